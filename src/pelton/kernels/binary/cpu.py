"""Native binary (``csrc/pointwise.inl``): dense operands of any float type, float32 out."""

from pelton.kernels.tactic import NodeSpec, Tactic

FLOATS = ("float32", "bfloat16", "float16")


def _supports(node: NodeSpec) -> bool:
    x, y = node.inputs
    return (
        x is not None
        and y is not None
        and x.dtype in FLOATS
        and y.dtype in FLOATS
        and (x.dtype == "float32" or bool(x.quant))
    )


TACTICS = [Tactic(name="cpu.binary", op="binary", supports=_supports, batch_invariant=True)]
