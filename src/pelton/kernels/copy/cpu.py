"""Native copy (``csrc/copy.cpp``): any dtype, any strides."""

from pelton.kernels.tactic import NodeSpec, Tactic


def _supports(node: NodeSpec) -> bool:
    (x,) = node.inputs
    return x is not None and not x.quant and 0 < len(x.shape) <= 4


TACTICS = [Tactic(name="cpu.copy", op="copy", supports=_supports, batch_invariant=True)]
