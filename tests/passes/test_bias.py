"""Vectors that are added to products, whole or seen as heads, become their biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton import nn
from pelton.ir.recipe import Concat, Flatten, Full, Source, Sum
from pelton.nn import functional as F
from pelton.passes import PassContext, attention_bias, fold_scaling, fuse_products, gemm_bias
from tests.passes.support import FLOAT32, Net, check_same, ops, traced

NO_BIAS = replace(FLOAT32, has_tactic=lambda spec: len(spec.inputs) < 3 or spec.inputs[2] is None)


class Vector(nn.Module):
    """A bias that is no linear layer's."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(*shape), requires_grad=False)


def added(bias: bool = False, flip: bool = False, size: int = 32) -> Net:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        y_TD = self.a(self.embed(ids))
        return self.v.weight + y_TD if flip else y_TD + self.v.weight

    return Net(body, a=nn.Linear(32, 32, bias=bias), v=Vector(size))


@pytest.mark.parametrize("flip", [False, True])
def test_a_vector_added_to_a_product_is_its_bias(flip: bool) -> None:
    net = added(flip=flip)
    graph = traced(net)
    report = gemm_bias.run(graph, FLOAT32)
    assert (report.matched, report.changed) == (1, 1)
    assert ops(graph) == ["embedding", "linear", "take_rows"]
    assert graph.recipes["a.bias"] == Source("v.weight")
    assert [n.meta["where"] for n in graph.calls] == ["embed", "a", ""]
    check_same(net, graph, tolerance=1e-6)


def test_a_bias_that_is_there_is_added_to() -> None:
    net = added(bias=True)
    graph = traced(net)
    assert gemm_bias.run(graph, FLOAT32).changed == 1
    assert Sum((Source("a.bias"), Source("v.weight"))) in graph.recipes.values()
    check_same(net, graph, tolerance=1e-6)


@pytest.mark.parametrize(
    ("net", "context", "why"),
    [
        (added(size=1), FLOAT32, "v.weight is no vector of 32 values"),
        (added(), NO_BIAS, "the target has no kernel for such a product"),
    ],
    ids=["one value", "no kernel"],
)
def test_other_sums_stay(net: Net, context: PassContext, why: str) -> None:
    graph = traced(net)
    before = ops(graph)
    report = gemm_bias.run(graph, context)
    assert [said for _, said in report.skipped] == [why]
    assert ops(graph) == before


def test_a_product_that_others_read_stays() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        y_TD = self.a(self.embed(ids))
        return y_TD + self.v.weight + y_TD

    report = gemm_bias.run(traced(Net(body, a=nn.Linear(32, 32), v=Vector(32))), FLOAT32)
    assert [why for _, why in report.skipped] == ["linear is read elsewhere too"]


def heads(k_bias: tuple[int, ...], reads_all: bool = False) -> Net:
    """q (4 heads), k and v (2 heads each) of a packed projection; k and v with biases of their own."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        qkv = self.qkv(self.embed(ids))
        q, k, v = qkv.split([32, 16, 16], dim=-1)
        k = k.view(-1, 2, 8) + self.k.weight
        v = v + self.v.weight
        rest = F.softcap(qkv, 3.0).split(32, dim=-1)[0] if reads_all else q
        both = self.mix(F.softcap(k, 3.0).view(-1, 16)) + self.mix(v)
        return F.softcap(q.view(-1, 4, 8), 3.0).view(-1, 32) + both + rest

    return Net(body, qkv=nn.Linear(32, 64), mix=nn.Linear(16, 32), k=Vector(*k_bias), v=Vector(16))


def test_biases_of_heads_go_into_the_projection() -> None:
    net = heads((2, 8))
    graph = traced(net)
    assert ops(graph).count("binary") == 2
    assert gemm_bias.run(graph, FLOAT32).matched == 0
    report = attention_bias.run(graph, FLOAT32)
    assert (report.matched, report.changed, report.skipped) == (2, 2, ())
    assert "binary" not in ops(graph)
    first = Concat((Full(32, 0.0), Flatten(Source("k.weight")), Full(16, 0.0)))
    second = Concat((Full(48, 0.0), Source("v.weight")))
    assert Sum((first, second)) in graph.recipes.values()
    check_same(net, graph, tolerance=1e-6)


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (heads((8,)), "k.weight is not of the shape [2, 8]"),
        (heads((2, 8), reads_all=True), "softcap reads the same columns"),
    ],
    ids=["one for all heads", "columns read elsewhere"],
)
def test_where_the_projection_cannot_take_a_bias_it_stays(net: Net, why: str) -> None:
    graph = traced(net)
    report = attention_bias.run(graph, FLOAT32)
    assert report.skipped[0][1] == why
    check_same(net, graph, tolerance=1e-6)


def test_a_bias_that_is_computed_stays() -> None:
    """As an imported model may have: nothing is folded into it, and the products stay apart."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = F.softcap(self.embed(ids), 3.0)
        shift = self.v.weight * 2.0
        y_TD = F.linear(x_TD, self.a.weight, shift) + self.v.weight
        return y_TD + F.linear(x_TD, self.b.weight, shift) * 0.3

    net = Net(body, a=nn.Linear(32, 32), b=nn.Linear(32, 32), v=Vector(32))
    graph = traced(net)
    before = ops(graph)
    for run, why in (
        (fuse_products.run, "a bias is computed"),
        (gemm_bias.run, "its bias is computed"),
        (fold_scaling.run, "mul is computed"),
    ):
        assert why in {said for _, said in run(graph, FLOAT32).skipped}, run.__module__
    assert ops(graph) == before
