"""Products of normed rows on NVIDIA GPUs (``linear/products.py``)."""

from pelton.kernels.linear.products import Form, tactics

TACTICS = tactics("norm_linear", Form(norm=3))
