"""What a pattern finds, captures and refuses, and what ``fuse`` leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pelton import nn
from pelton.ir.graph import Graph, op_name
from pelton.nn import functional as F
from pelton.passes.pattern import (
    Call,
    Match,
    call,
    item,
    match,
    number,
    rewrite,
    tensor,
    value,
    weight,
)
from tests.passes.support import FLOAT32, Net, check_same, ops, traced

LINEAR = call("linear", tensor("x"), weight("w"), value("bias"), name="product")


def mlp(self: Any, ids: Any, positions: Any) -> Any:
    x_TD = self.norm(self.embed(ids))
    gate, up = self.both(x_TD).split(48, dim=-1)
    return self.down(F.gated_activation(gate, up, "silu")) * 2.0


@pytest.fixture
def net() -> Net:
    parts = {"norm": nn.RMSNorm(32, eps=1e-6), "both": nn.Linear(32, 96), "down": nn.Linear(48, 32)}
    return Net(mlp, **parts)


@pytest.fixture
def graph(net: Net) -> Graph:
    return traced(net)


def find(graph: Graph, pattern: Call) -> list[Match]:
    found = (match(graph, FLOAT32, pattern, node) for node in graph.calls)
    return [m for m in found if m is not None]


def test_captures_nodes_numbers_and_absent_arguments(graph: Graph) -> None:
    scaled = find(graph, call("aten.mul.Tensor", LINEAR, number("factor")))
    assert [m["factor"] for m in scaled] == [2.0]
    (m,) = scaled
    assert m["bias"] is None
    assert op_name(m["product"]) == "linear"
    assert graph.inputs[m["w"].name].name == "down.weight"
    assert m.root.name == "mul"


def test_results_of_a_call_that_gives_several(graph: Graph) -> None:
    halves = call("aten.split.Tensor", LINEAR)
    both = call("gated_activation", item(halves, 0), item(halves, 1))
    assert len(find(graph, both)) == 1
    assert find(graph, call("gated_activation", item(halves, 1), item(halves, 0))) == []


def test_a_name_that_occurs_twice_is_the_same_thing(graph: Graph) -> None:
    one = call("gated_activation", tensor("half"), tensor("half"))
    assert find(graph, one) == []
    assert len(find(graph, call("gated_activation", tensor("a"), tensor("b")))) == 1


def test_literals_are_equal_in_type_too(graph: Graph) -> None:
    assert len(find(graph, call("aten.mul.Tensor", tensor("x"), 2.0))) == 1
    assert find(graph, call("aten.mul.Tensor", tensor("x"), 2)) == []
    assert len(find(graph, call("gated_activation", tensor("a"), tensor("b"), "silu"))) == 1
    assert find(graph, call("gated_activation", tensor("a"), tensor("b"), "gelu")) == []


def test_either_order_where_the_op_commutes() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = self.embed(ids)
        return x_TD + self.linear(x_TD)

    graph = traced(Net(body, linear=nn.Linear(32, 32)))
    assert len(find(graph, call("aten.add.Tensor", tensor("x"), LINEAR))) == 1
    assert find(graph, call("aten.add.Tensor", LINEAR, tensor("x"))) == []
    assert len(find(graph, call("aten.add.Tensor", LINEAR, tensor("x"), commutes=True))) == 1


def test_views_are_looked_through_where_the_pattern_says_so() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_THD = self.linear(self.embed(ids)).view(-1, 4, 8)
        return F.softcap(x_THD, 3.0).view(-1, 32)

    graph = traced(Net(body, linear=nn.Linear(32, 32)))
    assert find(graph, call("softcap", LINEAR)) == []
    seen = call("linear", tensor("x"), name="product", through_views=True)
    (m,) = find(graph, call("softcap", seen))
    assert m.why_shared() is None


def test_what_is_read_elsewhere_is_refused_with_the_reader() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        y_TD = self.linear(self.embed(ids))
        return y_TD * 2.0 + y_TD

    net = Net(body, linear=nn.Linear(32, 32))
    graph = traced(net)
    pattern = call("aten.mul.Tensor", LINEAR, number("factor"))
    report = rewrite(graph, FLOAT32, "test", [(pattern, lambda m: None)])
    assert (report.matched, report.changed) == (1, 0)
    assert report.skipped == (("mul", "linear is read elsewhere too"),)
    shared = replace(pattern, arguments=(replace(LINEAR, shared=True), number("factor")))
    assert rewrite(graph, FLOAT32, "test", [(shared, lambda m: None)]).changed == 1


def _gated(m: Match) -> str | None:
    return m.fuse("linear_gated", (m["x"], m["w"], None, m["kind"]))


def test_fuse_replaces_the_place_and_keeps_where_it_was_made(net: Net, graph: Graph) -> None:
    halves = call("aten.split.Tensor", LINEAR)
    gated = call("gated_activation", item(halves, 0), item(halves, 1), value("kind"))
    report = rewrite(graph, FLOAT32, "test", [(gated, _gated)])
    assert (report.matched, report.changed, report.skipped) == (1, 1, ())
    fused = next(n for n in graph.calls if op_name(n) == "linear_gated")
    assert ops(graph) == ["embedding", "rms_norm", "linear_gated", "linear", "aten.mul.Tensor", "take_rows"]
    assert fused.meta["where"] == ""
    assert graph.type_of(fused).shape == ("T", 48)
    check_same(net, graph)


def test_nothing_is_fused_that_the_target_cannot_run(graph: Graph) -> None:
    without = replace(FLOAT32, has_tactic=lambda spec: spec.op != "linear_gated")
    halves = call("aten.split.Tensor", LINEAR)
    gated = call("gated_activation", item(halves, 0), item(halves, 1), value("kind"))
    before = ops(graph)
    report = rewrite(graph, without, "test", [(gated, _gated)])
    assert report.skipped == (
        ("gated_activation", "the target has no kernel for linear_gated of these types"),
    )
    assert ops(graph) == before


def test_a_place_that_an_earlier_rewrite_took_is_not_matched_again() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        return self.embed(ids) * 2.0 * 3.0 * 4.0

    graph = traced(Net(body))
    double = call("aten.mul.Tensor", call("aten.mul.Tensor", tensor("x"), number("a")), number("b"))

    def join(m: Match) -> None:
        m.root.args = (m["x"], m["a"] * m["b"])
        m.erase()

    report = rewrite(graph, FLOAT32, "test", [(double, join)])
    assert (report.changed, [n.args[1] for n in graph.calls if op_name(n) == "aten.mul.Tensor"]) == (
        2,
        [24.0],
    )
