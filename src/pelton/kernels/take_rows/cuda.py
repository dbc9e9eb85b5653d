"""take_rows on NVIDIA GPUs: the gather of ``embedding``."""

from __future__ import annotations

from pelton.kernels.embedding.cuda import gather_launch
from pelton.kernels.tactic import Tactic, float_rows

TACTICS = [
    Tactic(
        name="cuda.take_rows",
        op="take_rows",
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=lambda call, max_tokens: (gather_launch(call, 1, 0),),
    )
]
