"""The pass by which kernels leave codes for the product behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton import nn
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.verifier import verify
from pelton.nn import functional as F
from pelton.passes import gemm_residual, gemm_swiglu, quantise_results, static_inputs
from pelton.passes.base import PassContext
from tests.ir.graph_forward import graph_forward
from tests.passes.support import ANY_KERNEL, Net, traced

SCALES = {"fp8": 0.0625, "int8": 0.125}


def context(codes: str = "fp8", **changes: Any) -> PassContext:
    quants = (ActivationQuant(codes, "tensor", scale=SCALES[codes]),)
    return replace(ANY_KERNEL, **{"activations": codes, "input_quants": lambda recipe: quants, **changes})


def mlp(twice: bool = False) -> Net:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x = self.embed(ids)
        gate, up = self.both(x).split(24, dim=-1)
        y = F.gated_activation(gate, up, "silu")
        return self.down(y) + (self.other(y) + x if twice else x)

    other = {"other": nn.Linear(24, 32)} if twice else {}
    return Net(body, both=nn.Linear(32, 48), down=nn.Linear(24, 32), **other)


def prepared(net: Net, given: PassContext) -> Graph:
    """Up to the pass."""
    graph = traced(net)
    for before in (gemm_swiglu, gemm_residual, static_inputs):
        before.run(graph, given)
    return graph


def run(net: Net, graph: Graph, tokens: int) -> torch.Tensor:
    graph.module.recompile()
    verify(graph)
    result: torch.Tensor = graph_forward(graph, net, net.read)(*net.arguments(tokens))
    return result


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_a_gated_product_leaves_what_the_next_would_round(codes: str) -> None:
    net = mlp()
    graph = prepared(net, context(codes))
    before = run(net, graph, 17)
    report = quantise_results.PASS.run(graph, context(codes))
    assert (report.matched, report.changed) == (1, 1)
    (gated,), (down,) = (
        [n for n in graph.calls if op_name(n) == op] for op in ("linear_gated", "linear_add")
    )
    assert graph.type_of(gated).dtype == {"fp8": "float8_e4m3fn", "int8": "int8"}[codes]
    assert graph.type_of(down).dtype == "float32"
    for y, x in (("y_scale", "x_scale"), ("y_codes", "x_codes")):
        assert argument(gated, y) == argument(down, x)
    assert torch.equal(run(net, graph, 17), before)


@pytest.mark.parametrize(
    ("net", "refused", "why"),
    [
        (mlp(twice=True), lambda spec: False, "read elsewhere too"),
        (mlp(), lambda spec: "y_scale" in spec.attrs, "no kernel for linear_gated"),
        (mlp(), lambda spec: spec.inputs[0].dtype == "float8_e4m3fn", "no kernel for linear_add"),
    ],
)
def test_places_that_are_refused(net: Net, refused: Any, why: str) -> None:
    given = context(has_tactic=lambda spec: not refused(spec))
    graph = prepared(net, given)
    report = quantise_results.PASS.run(graph, given)
    assert report.changed == 0
    assert all(why in said for _, said in report.skipped)
    assert len(report.skipped) == report.matched > 0
    assert all(argument(n, "y_scale") is None for n in graph.calls if op_name(n) == "linear_gated")


def test_products_without_a_static_scale_are_no_match() -> None:
    given = context(input_quants=lambda recipe: ())
    assert quantise_results.PASS.run(prepared(mlp(), given), given).matched == 0
