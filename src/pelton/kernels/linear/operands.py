"""What the native products ask of their operands (``csrc/gemm_linear.h``)."""

from __future__ import annotations

from pelton.kernels.gated_activation.cpu import KINDS
from pelton.kernels.tactic import NodeSpec, no_codes

#: Ends the names of int8 tactics that unpack a panel's weights before its products from 2 tokens on (the
#: others from 9 on). The results are the same, bit for bit.
UNPACKED = ".unpacked"


def float_input(node: NodeSpec, quant: str) -> bool:
    """Whether input and bias are float32, no static scale rounds input or result, and the weight's values are
    of type ``quant``."""
    x, weight, *rest = node.inputs
    plain = all(t is None or t.dtype == "float32" for t in (x, *rest))
    return plain and weight is not None and (weight.quant or weight.dtype) == quant and no_codes(node)


def quantised_input(node: NodeSpec, quant: str) -> bool:
    """Whether the input is quantised rows, the bias float32, and the weight's type ``quant``."""
    x, weight, bias = node.inputs
    assert x is not None and weight is not None
    return x.dtype == "uint8" and weight.quant == quant and (bias is None or bias.dtype == "float32")


def gated(node: NodeSpec) -> bool:
    """Whether gate and up begin at a panel of rows each, and the activation is one of the library's."""
    weight = node.inputs[1]
    assert weight is not None
    return int(weight.shape[0]) % 32 == 0 and node.attrs["kind"] in KINDS
