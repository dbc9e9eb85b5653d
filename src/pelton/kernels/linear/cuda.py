"""Products on NVIDIA GPUs (``products.py``, ``packed.py``)."""

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

FORM = Form()
TACTICS = [
    *tactics("linear", FORM),
    *packed_tactics("linear", FORM),
    *few_tactics("linear", FORM),
    *wide_tactics("linear", FORM),
    *rows8_tactics("linear", FORM),
    *product_tactics("linear", FORM),
    *block_tactics("linear", FORM),
    *dense_tactics("linear", FORM),
    *invariant_tactics("linear", FORM),
    *half_sums_tactics("linear", FORM),
]
