"""Gated products of normed rows on NVIDIA GPUs (``linear/products.py``)."""

from pelton.kernels.linear.products import Form, tactics

TACTICS = tactics("norm_linear_gated", Form(gated=True, norm=3))
