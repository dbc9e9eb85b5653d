"""explicit_quantise: the int8 rounding of what block-quantised products read becomes a node of the graph.

With int8 activations a product quantises its input inside its kernel. As ``quantize_q8`` and
``dequantize_q8`` in the graph, several products share one quantisation, and ``norm_quantise`` lets the
norm before them do it. Only where one of these will happen: else the product does it more cheaply.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from pelton.dtypes import is_dense
from pelton.ir.graph import Graph, op_name
from pelton.ir.op import get_op
from pelton.ir.ops.quantize_q8 import BLOCK, BLOCK_BYTES
from pelton.kernels.tactic import TensorSpec
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import stored
from pelton.passes.pattern import arguments, is_weight

NAME = "explicit_quantise"
PRODUCTS = ("linear", "linear_gated")


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``linear(x, w)`` to ``linear(dequantize_q8(quantize_q8(x)), w)`` where w is quantised."""
    if context.activations != "int8":
        return PassReport(name=NAME, matched=0, changed=0, note="activations are float32")
    if context.modes.get("move_quantise") == "off":
        # Nothing would take dequantize_q8 into the products, and no target runs it by itself.
        return PassReport(name=NAME, matched=0, changed=0, note="move_quantise is off")
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.calls:
        if op_name(node) in PRODUCTS and is_weight(graph, node.args[1]):
            x, weight = node.args[:2]
            assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
            if not is_dense(stored(graph, context, weight)):
                by_input.setdefault(x, []).append(node)
    changed, skipped = 0, []
    for x, products in by_input.items():
        why = _why_not(graph, context, x, products)
        if why is not None:
            skipped.append((products[0].name, why))
            continue
        quantised = graph.insert_call("quantize_q8", (x,), like=x, before=products[0])
        back = graph.insert_call("dequantize_q8", (quantised,), like=x, before=products[0])
        for product in products:
            product.update_arg(0, back)
        changed += 1
    return PassReport(name=NAME, matched=len(by_input), changed=changed, skipped=tuple(skipped))


def _why_not(graph: Graph, context: PassContext, x: fx.Node, products: list[fx.Node]) -> str | None:
    kind = graph.type_of(x)
    if not isinstance(kind.shape[1], int) or kind.shape[1] % BLOCK:
        return f"rows of {kind.shape[1]} values do not divide into blocks of {BLOCK}"
    if len(products) == 1 and not _norm_can_quantise(x):
        return "one product reads this, after no norm: it quantises by itself"
    quantised = TensorSpec(dtype="uint8", shape=(kind.shape[0], kind.shape[1] // BLOCK * BLOCK_BYTES))
    wanted: list[tuple[str, tuple[Any, ...]]] = [("quantize_q8", (x,))]
    for product in products:
        op = op_name(product) + "_q8"
        # What follows says how input and result are rounded with a static scale.
        count = len(get_op(op).torch_op._schema.arguments)
        wanted.append((op, (quantised, *arguments(product)[1:count])))
    for op, args in wanted:
        if not context.supports(graph, op, args):
            return f"the target has no kernel for {op} of these types"
    return None


def _norm_can_quantise(x: fx.Node) -> bool:
    """Whether a norm gives ``x`` and only products read it."""
    producer = x.args[0] if op_name(x) == "getitem" and x.args[1] == 0 else x
    normed = isinstance(producer, fx.Node) and op_name(producer) in ("rms_norm", "add_rms_norm")
    return normed and all(op_name(user) in PRODUCTS for user in x.users)


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(x, blocks) -> linear(dequantize_q8(quantize_q8(x)), blocks)",
    bound="nothing: products with int8 activations round so anyway",
    needs=("gemm_swiglu", "add_rms_norm"),
    fast=False,
)
