"""Products that are added to a residual, on NVIDIA GPUs (``linear/products.py``)."""

from pelton.kernels.linear.products import Form, tactics

TACTICS = tactics("linear_add", Form(residual=3))
