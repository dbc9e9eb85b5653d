"""The pass that tells products of their input's static scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pelton import nn
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.graph import op_name
from pelton.ir.verifier import verify
from pelton.passes import static_inputs
from pelton.passes.pattern import arguments
from tests.passes.support import FLOAT32, Net, traced

STATIC = ActivationQuant("fp8", "tensor", scale=0.5)
CONTEXT = replace(FLOAT32, activations="fp8")


def net() -> Net:
    return Net(lambda m, ids, positions: m.out(m.embed(ids)), out=nn.Linear(32, 32))


def product(graph: Any) -> Any:
    (node,) = (n for n in graph.calls if op_name(n) == "linear")
    return node


def test_a_product_of_stacked_layers_has_the_largest_of_their_scales() -> None:
    graph = traced(net())
    quants = (STATIC, of_scale(0.75), of_scale(0.25))
    report = static_inputs.PASS.run(graph, replace(CONTEXT, input_quants=lambda recipe: quants))
    assert (report.matched, report.changed) == (1, 1)
    assert arguments(product(graph))[-2:] == [0.75, "fp8"]
    graph.module.recompile()
    verify(graph)


def of_scale(scale: float) -> ActivationQuant:
    return ActivationQuant("fp8", "tensor", scale=scale)


@pytest.mark.parametrize(
    ("quants", "changes", "why"),
    [
        ((STATIC, None), {}, "not every layer"),
        ((STATIC, ActivationQuant("int8", "tensor", scale=0.5)), {}, "not every layer"),
        ((STATIC, ActivationQuant("fp8")), {}, "not every layer"),
        ((STATIC,), {"activations": "bfloat16"}, "activations are bfloat16"),
        ((STATIC,), {"has_tactic": lambda spec: "x_scale" not in spec.attrs}, "no kernel for linear"),
    ],
)
def test_places_that_are_refused(quants: Any, changes: dict[str, Any], why: str) -> None:
    graph = traced(net())
    context = replace(CONTEXT, **{"input_quants": lambda recipe: quants, **changes})
    report = static_inputs.PASS.run(graph, context)
    assert report.changed == 0
    assert why in report.skipped[0][1]
    assert arguments(product(graph))[-2:] == [None, None]


def test_dynamic_scales_leave_a_product_alone() -> None:
    graph = traced(net())
    context = replace(CONTEXT, input_quants=lambda recipe: (ActivationQuant("fp8"),))
    assert static_inputs.PASS.run(graph, context).matched == 0
