"""Gated products on NVIDIA GPUs (``linear/products.py``)."""

from pelton.kernels.linear.products import Form, tactics

TACTICS = tactics("linear_gated", Form(gated=True))
