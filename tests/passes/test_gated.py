"""Gate, up and their activation as one product: SwiGLU, GeGLU, with biases; and where that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pelton import nn
from pelton.builder.trace import trace
from pelton.ir.graph import op_name
from pelton.nn import functional as F
from pelton.passes import PASSES, gemm_swiglu, run_graph_passes, run_model_passes
from tests.models import zoo
from tests.passes.support import FLOAT32, Net, by_name, check_same, create, ops, traced


def gated(kind: str = "silu", bias: bool = False, split: Any = 24, swap: bool = False) -> Net:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        gate, up = self.both(self.embed(ids)).split(split, dim=-1)
        return self.down(F.gated_activation(*((up, gate) if swap else (gate, up)), kind))

    return Net(body, both=nn.Linear(32, 48, bias=bias), down=nn.Linear(24, 32))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_product_is_one_call(kind: str, bias: bool) -> None:
    net = gated(kind, bias)
    graph = traced(net)
    report = gemm_swiglu.run(graph, FLOAT32)
    assert (report.matched, report.changed) == (1, 1)
    assert ops(graph) == ["embedding", "linear_gated", "linear", "take_rows"]
    fused = next(n for n in graph.calls if op_name(n) == "linear_gated")
    assert graph.type_of(fused).shape == ("T", 24)
    assert fused.args[3] == kind
    check_same(net, graph, tolerance=1e-6)


@pytest.mark.parametrize("make", [zoo.llama, zoo.gemma, zoo.phi3, zoo.gemma3])
def test_every_mlp_of_a_model_is_fused(make: Any) -> None:
    model = create(make())
    run_model_passes(PASSES, model, FLOAT32)
    graph = trace(model, max_seq_len=64, block_size=4)
    reports = by_name(run_graph_passes(PASSES, graph, FLOAT32))
    assert reports["gemm_swiglu"].changed == model.num_layers
    assert "gated_activation" not in ops(graph)


def test_a_weight_that_modules_share_is_not_stacked() -> None:
    model = create(zoo.llama())
    first, second = (layer.mlp for layer in model.model.layers[:2])
    second.up_proj.weight = first.up_proj.weight
    report = by_name(run_model_passes(PASSES, model, FLOAT32))["fuse_gate_mlp"]
    assert report.changed == model.num_layers - 1
    assert report.skipped == (("model.layers.1.mlp", "another module has the weight of up_proj too"),)
    nn.collect_recipes(model)


def test_halves_in_the_other_order_are_no_match() -> None:
    assert gemm_swiglu.run(traced(gated(swap=True)), FLOAT32).matched == 0


@pytest.mark.parametrize(
    ("net", "context", "why"),
    [
        (
            gated(),
            replace(FLOAT32, has_tactic=lambda spec: spec.op != "linear_gated"),
            "the target has no kernel for linear_gated of these types",
        ),
        (
            Net(
                lambda self, ids, positions: self.down(
                    F.gated_activation(*self.both(self.embed(ids)).split(16, dim=-1)[:2], "silu")
                ),
                both=nn.Linear(32, 48),
                down=nn.Linear(16, 32),
            ),
            FLOAT32,
            "linear has 48 columns, not two halves of 16",
        ),
    ],
    ids=["no kernel", "thirds"],
)
def test_other_products_stay_apart(net: Net, context: Any, why: str) -> None:
    graph = traced(net)
    before = ops(graph)
    report = gemm_swiglu.run(graph, context)
    assert report.skipped == (("gated_activation", why),)
    assert ops(graph) == before
