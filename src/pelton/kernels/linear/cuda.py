"""Products on NVIDIA GPUs (``products.py``)."""

from pelton.kernels.linear.products import Form, tactics

TACTICS = tactics("linear", Form())
