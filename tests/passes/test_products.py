"""Products of one tensor become one in graphs whose modules no pass knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton import nn
from pelton.builder.trace import trace
from pelton.ir.graph import op_name
from pelton.ir.recipe import Concat, Full, Source
from pelton.nn import functional as F
from pelton.passes import PASSES, PassContext, fuse_products, gemm_swiglu, run_graph_passes
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import load_ours, read_from, relative_error, texts
from tests.models.paged import PagedRunner, run_packed
from tests.passes.support import FLOAT32, Net, by_name, check_same, logits, ops, traced


def three(bias: tuple[bool, ...] = (False, False, False)) -> Net:
    """q, k and v of one tensor, seen as heads."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = F.softcap(self.embed(ids), 3.0)
        q, k, v = (
            F.softcap(part(x_TD).view(-1, 2, 8), 2.0).view(-1, 16) for part in (self.q, self.k, self.v)
        )
        return self.out(q + k + v)

    q, k, v = (nn.Linear(32, 16, bias=b) for b in bias)
    return Net(body, q=q, k=k, v=v, out=nn.Linear(16, 32))


def test_three_products_of_one_tensor_are_one() -> None:
    net = three()
    graph = traced(net)
    report = fuse_products.run(graph, FLOAT32)
    assert (report.matched, report.changed) == (1, 1)
    assert ops(graph).count("linear") == 2
    assert graph.recipes["q+k+v.weight"] == Concat(tuple(Source(f"{p}.weight") for p in "qkv"))
    views = [graph.type_of(n.args[0]) for n in graph.calls if op_name(n) == "softcap"][1:]  # type: ignore[arg-type]
    assert [(v.shape, v.strides, v.offset) for v in views] == [
        (("T", 2, 8), (48, 8, 1), offset) for offset in (0, 16, 32)
    ]
    check_same(net, graph, tolerance=1e-6)


def test_where_only_some_have_a_bias_the_others_get_zeros() -> None:
    net = three(bias=(True, False, True))
    graph = traced(net)
    assert fuse_products.run(graph, FLOAT32).changed == 1
    assert graph.recipes["q+k+v.bias"] == Concat((Source("q.bias"), Full(16, 0.0), Source("v.bias")))
    check_same(net, graph, tolerance=1e-6)


def test_of_different_types_those_of_one_type_are_joined() -> None:
    net = three()
    graph = traced(net)
    mixed = replace(FLOAT32, quant_of=lambda r: "q6_k" if r == Source("v.weight") else "q4_k")
    assert fuse_products.run(graph, mixed).changed == 1
    assert graph.recipes["q+k.weight"] == Concat((Source("q.weight"), Source("k.weight")))
    assert {"v.weight", "out.weight"} <= graph.weights().keys()
    check_same(net, graph, tolerance=1e-6)


def test_gate_and_up_are_stacked_by_themselves_and_then_gated() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = F.softcap(self.embed(ids), 3.0)
        y_TD = self.down(F.gated_activation(self.gate(x_TD), self.up(x_TD), "silu"))
        return y_TD + self.a(x_TD) + self.b(x_TD)

    parts = {"up": nn.Linear(32, 48), "gate": nn.Linear(32, 48), "down": nn.Linear(48, 32)}
    net = Net(body, **parts, a=nn.Linear(32, 32), b=nn.Linear(32, 32))
    graph = traced(net)
    assert fuse_products.run(graph, FLOAT32).changed == 2
    assert gemm_swiglu.run(graph, FLOAT32).changed == 1
    assert graph.recipes["gate+up.weight"] == Concat((Source("gate.weight"), Source("up.weight")))
    assert sorted(op for op in ops(graph) if "linear" in op) == ["linear", "linear", "linear_gated"]
    check_same(net, graph, tolerance=1e-6)


@pytest.mark.parametrize(
    ("net", "context", "why"),
    [
        (three(), replace(FLOAT32, modes={"fuse_qkv": "off"}), "fuse_qkv is switched off"),
        (three(), replace(FLOAT32, modes={"unfuse_qkv_gemm": "force"}), "unfuse_qkv_gemm is forced"),
        (
            three(),
            replace(FLOAT32, has_tactic=lambda spec: spec.inputs[1].shape[0] == 16),
            "the target has no kernel for the product of all",
        ),
    ],
    ids=["off", "unfused", "no kernel"],
)
def test_where_they_cannot_be_one_they_stay(net: Net, context: PassContext, why: str) -> None:
    graph = traced(net)
    before = ops(graph)
    report = fuse_products.run(graph, context)
    assert [said for _, said in report.skipped] == [why]
    assert ops(graph) == before


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen3, zoo.gemma3])
def test_a_model_that_no_model_pass_saw_is_fused_as_well(make: Any) -> None:
    hf = make()
    model = load_ours(hf)
    graph = trace(model, max_seq_len=64, block_size=4)
    reports = by_name(run_graph_passes(PASSES, graph, FLOAT32))
    assert reports["fuse_products"].changed == 2 * model.num_layers
    assert reports["gemm_swiglu"].changed == reports["rope_kv_write"].changed == model.num_layers
    products = [op_name(n) for n in graph.calls if "linear" in op_name(n)]
    assert len(products) == 4 * model.num_layers + 1
    forward = graph_forward(graph, model, read_from(hf.state_dict()))
    got = torch.cat(run_packed(PagedRunner(model, forward=forward), texts((14, 9))))
    assert relative_error(got, logits(model)) < 1e-5
