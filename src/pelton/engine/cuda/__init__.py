"""Engines on NVIDIA GPUs: memory, launches and graphs. No torch, no Triton."""
