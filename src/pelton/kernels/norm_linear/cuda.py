"""Products of normed rows on NVIDIA GPUs (``linear/products.py``, ``linear/packed.py``)."""

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

FORM = Form(norm=3)
TACTICS = [
    *tactics("norm_linear", FORM),
    *packed_tactics("norm_linear", FORM),
    *few_tactics("norm_linear", FORM),
    *wide_tactics("norm_linear", FORM),
    *rows8_tactics("norm_linear", FORM),
    *product_tactics("norm_linear", FORM),
    *block_tactics("norm_linear", FORM),
    *dense_tactics("norm_linear", FORM),
    *invariant_tactics("norm_linear", FORM),
    *half_sums_tactics("norm_linear", FORM),
]
