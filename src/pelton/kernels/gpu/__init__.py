"""NVIDIA's libraries through ctypes: the driver API and cuBLASLt. No torch, no Triton."""
