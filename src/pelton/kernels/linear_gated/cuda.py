"""Gated products on NVIDIA GPUs (``linear/products.py``, ``linear/packed.py``)."""

from pelton.kernels.linear.half_sums import half_sums_tactics
from pelton.kernels.linear.hopper_blocks import block_tactics
from pelton.kernels.linear.hopper_invariant import invariant_tactics
from pelton.kernels.linear.hopper_products import dense_tactics, product_tactics
from pelton.kernels.linear.packed import packed_tactics
from pelton.kernels.linear.packed_few import few_tactics
from pelton.kernels.linear.packed_wide import wide_tactics
from pelton.kernels.linear.product_tactics import tactics
from pelton.kernels.linear.products import Form
from pelton.kernels.linear.rows8 import rows8_tactics

FORM = Form(gated=True)
TACTICS = [
    *tactics("linear_gated", FORM),
    *packed_tactics("linear_gated", FORM),
    *few_tactics("linear_gated", FORM),
    *wide_tactics("linear_gated", FORM),
    *rows8_tactics("linear_gated", FORM),
    *product_tactics("linear_gated", FORM),
    *block_tactics("linear_gated", FORM),
    *dense_tactics("linear_gated", FORM),
    *invariant_tactics("linear_gated", FORM),
    *half_sums_tactics("linear_gated", FORM),
]
