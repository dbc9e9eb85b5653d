"""Explicit int8 inputs: shared, moved, done by norms; and where products better do it themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton import nn
from pelton.ir.graph import Graph, op_name
from pelton.ir.ops import quantize_q8
from pelton.nn import functional as F
from pelton.passes import (
    PassContext,
    add_rms_norm,
    explicit_quantise,
    gemm_swiglu,
    move_quantise,
    norm_quantise,
)
from tests.ir.graph_forward import graph_forward
from tests.passes.support import Net, ops, traced

INT8 = PassContext(
    quant_of=lambda recipe: "q4_0",
    stored_quant=lambda recipe, dimensions: "q4_0" if dimensions > 1 else "float32",
    activations="int8",
)


def parts() -> dict[str, torch.nn.Module]:
    return {
        "norm": nn.RMSNorm(32, eps=1e-6),
        "norm2": nn.RMSNorm(32, eps=1e-6),
        "qkv": nn.Linear(32, 32),
        "other": nn.Linear(32, 32),
        "both": nn.Linear(32, 128),
        "down": nn.Linear(64, 32),
    }


def block(self: Any, ids: Any, positions: Any) -> Any:
    """A layer without its attention."""
    x_TD = self.embed(ids)
    x_TD = x_TD + self.qkv(self.norm(x_TD))
    gate, up = self.both(self.norm2(x_TD)).split(64, dim=-1)
    return x_TD + self.down(F.gated_activation(gate, up, "silu"))


def quantise(graph: Graph, context: PassContext = INT8) -> list[Any]:
    return [p.run(graph, context) for p in (explicit_quantise, move_quantise, norm_quantise)]


def check_int8(net: Net, graph: Graph, rounded: tuple[str, ...]) -> None:
    """The graph computes what the model does with the inputs of the linears ``rounded`` as int8."""
    graph.module.recompile()
    forward = graph_forward(graph, net, net.read)
    to_int8 = lambda module, args: (quantize_q8.dequantize(quantize_q8.reference(args[0])),)
    hooks = [net.get_submodule(name).register_forward_pre_hook(to_int8) for name in rounded]
    for tokens in (1, 2, 17):
        arguments = net.arguments(tokens)
        torch.testing.assert_close(forward(*arguments), net(*arguments), rtol=1e-5, atol=1e-5)
    for hook in hooks:
        hook.remove()


def test_norms_quantise_for_the_products_after_them() -> None:
    net = Net(block, **parts())
    graph = traced(net)
    add_rms_norm.run(graph, INT8)
    gemm_swiglu.run(graph, INT8)
    explicit, moved, fused = quantise(graph)
    assert (explicit.changed, moved.changed, fused.changed) == (2, 2, 2)
    assert [why for _, why in explicit.skipped] == [
        "one product reads this, after no norm: it quantises by itself"
    ]
    assert ops(graph) == [
        "embedding",
        "rms_norm_q8",
        "linear_q8",
        "add_rms_norm_q8",
        "getitem",
        "getitem",
        "linear_gated_q8",
        "linear",
        "aten.add.Tensor",
        "take_rows",
    ]
    where = {op_name(n): n.meta["where"] for n in graph.calls}
    assert where["rms_norm_q8"] == "norm"
    assert where["linear_gated_q8"] == ""
    check_int8(net, graph, ("qkv", "both"))


def test_products_of_one_tensor_share_its_quantisation() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = F.softcap(self.embed(ids), 3.0)
        return self.qkv(x_TD) + self.other(x_TD)

    net = Net(body, **parts())
    graph = traced(net)
    quantise(graph)
    assert ops(graph).count("quantize_q8") == 1
    assert ops(graph).count("linear_q8") == 2
    assert "dequantize_q8" not in ops(graph)
    check_int8(net, graph, ("qkv", "other"))


def test_views_of_the_same_rows_share_one_too() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = F.softcap(self.embed(ids), 3.0)
        again_TD = x_TD.view(-1, 4, 8).view(-1, 32)
        a, b = self.qkv(x_TD), self.other(x_TD)
        return (
            a
            + b
            + self.both(again_TD).split(32, dim=-1)[0]
            + self.down(self.both(again_TD).split(64, dim=-1)[0])
        )

    net = Net(body, **parts())
    graph = traced(net)
    quantise(graph)
    assert ops(graph).count("quantize_q8") == 1
    check_int8(net, graph, ("qkv", "other", "both"))


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (replace(INT8, activations="float32"), "activations are float32"),
        (
            replace(INT8, has_tactic=lambda spec: not spec.op.endswith("_q8")),
            "the target has no kernel for quantize_q8 of these types",
        ),
    ],
    ids=["float32", "no kernel"],
)
def test_elsewhere_nothing_is_quantised(context: PassContext, why: str) -> None:
    graph = traced(Net(block, **parts()))
    before = ops(graph)
    explicit, moved, fused = quantise(graph, context)
    assert ops(graph) == before
    assert explicit.note == why or (explicit.changed == 0 and explicit.skipped[0][1] == why)
    assert (moved.changed, fused.changed) == (0, 0)


def test_dense_products_keep_their_inputs() -> None:
    dense = replace(INT8, stored_quant=lambda recipe, dimensions: "float32")
    assert explicit_quantise.run(traced(Net(block, **parts())), dense).matched == 0


def test_a_norm_that_others_read_stays() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = self.norm(self.embed(ids))
        return self.qkv(x_TD) + self.other(x_TD) + x_TD

    net = Net(body, **parts())
    graph = traced(net)
    *_, fused = quantise(graph)
    assert fused.skipped == (("quantize_q8", "rms_norm is read elsewhere too"),)
    check_int8(net, graph, ("qkv", "other"))


def test_a_round_trip_of_quantised_rows_is_no_second_rounding() -> None:
    net = Net(lambda self, ids, positions: F.softcap(self.embed(ids), 3.0))
    graph = traced(net)
    capped = next(n for n in graph.calls if op_name(n) == "softcap")
    take = capped.next
    node = capped
    for op in ("quantize_q8", "dequantize_q8", "quantize_q8", "dequantize_q8"):
        node = graph.insert_call(op, (node,), like=capped, before=take)
    take.update_arg(0, node)
    report = move_quantise.run(graph, INT8)
    assert report.changed == 1
    assert ops(graph) == ["embedding", "softcap", "quantize_q8", "dequantize_q8", "take_rows"]


def test_products_without_a_kernel_for_quantised_rows_keep_theirs() -> None:
    net = Net(block, **parts())
    graph = traced(net)
    explicit_quantise.run(graph, INT8)
    report = move_quantise.run(graph, replace(INT8, has_tactic=lambda spec: spec.op != "linear_q8"))
    assert report.changed == 0
    assert {why for _, why in report.skipped} == {"the target has no kernel for linear_q8 of these types"}
    assert "dequantize_q8" in ops(graph)
    check_int8(net, graph, ("qkv", "both"))
