"""Native rms_norm_q8 (``csrc/quantise.inl``)."""

from __future__ import annotations

from pelton.kernels.tactic import SCRATCH_BYTES, NodeSpec, Tactic, all_float32


def _supports(node: NodeSpec) -> bool:
    x = node.inputs[0]
    assert x is not None
    return all_float32(node) and len(x.shape) == 2 and 4 * int(x.shape[1]) <= SCRATCH_BYTES


TACTICS = [Tactic(name="cpu.rms_norm_q8", op="rms_norm_q8", supports=_supports, batch_invariant=True)]
