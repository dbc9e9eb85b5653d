"""Passes that take away: constants, views, equal calls, dead code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton import nn
from pelton.builder.trace import trace
from pelton.ir.graph import op_name
from pelton.ir.verifier import effects, verify
from pelton.nn import functional as F
from pelton.passes import constant_folding, cse, dead_code, simplify_views
from tests.models import zoo
from tests.passes.support import FLOAT32, Net, check_same, create, ops, traced


class Rotations(nn.Module):
    """Reads a constant after arithmetic on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(1.0, 0.1, 16), persistent=False)

    def forward(self, positions: Any, factor: float) -> Any:
        halved = self.inv_freq * factor
        return F.rope_cos_sin(positions, halved + halved, 1.0)


def test_arithmetic_on_constants_is_done_at_build() -> None:
    net = Net(lambda self, ids, positions: self.embed(ids) + self.rope(positions, 0.5), rope=Rotations())
    graph = traced(net)
    assert ops(graph).count("aten.mul.Tensor") == 1
    report = constant_folding.run(graph, FLOAT32)
    # The product is only read by the sum, and goes with it.
    assert (report.matched, report.changed) == (1, 1)
    assert ops(graph) == ["embedding", "rope_cos_sin", "aten.add.Tensor", "take_rows"]
    dead_code.run(graph, FLOAT32)
    assert [i.name for i in graph.inputs.values() if i.kind == "constant"] == ["constant_folding.add"]
    check_same(net, graph)


def test_a_product_with_one_is_its_operand() -> None:
    net = Net(lambda self, ids, positions: self.embed(ids) * 1.0 * 2.0)
    graph = traced(net)
    assert constant_folding.run(graph, FLOAT32).changed == 1
    assert ops(graph) == ["embedding", "aten.mul.Tensor", "take_rows"]
    check_same(net, graph)


def test_constants_that_an_engine_cannot_store_are_left_with_the_reason() -> None:
    graph = traced(Net(lambda self, ids, positions: self.embed(ids)))
    take = next(n for n in graph.calls if op_name(n) == "take_rows")
    table = graph.insert_constant("table", torch.arange(8).view(4, 2))
    index = graph.insert_constant("index", torch.tensor([2, 0], dtype=torch.int32))
    picked = graph.insert_call("take_rows", (table, index), like=take, before=take)
    graph.insert_call("take_rows", (take.args[0], picked), like=take, before=take)
    report = constant_folding.run(graph, FLOAT32)
    assert (report.changed, report.skipped) == (
        0,
        ((picked.name, "constants are single float32 tensors"),),
    )
    assert picked in graph.calls


def test_constants_that_are_only_viewed_and_weights_stay() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        return self.embed(ids) + F.rope_cos_sin(positions, self.rope.inv_freq.view(4, 4).view(16), 1.0)

    net = Net(body, rope=Rotations())
    graph = traced(net)
    report = constant_folding.run(graph, FLOAT32)
    assert (report.matched, report.changed) == (0, 0)
    check_same(net, graph)


def test_a_view_and_its_opposite_vanish() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = self.embed(ids)
        back = x_TD.view(-1, 4, 8).unflatten(1, (2, 2)).flatten(1, 2).view(-1, 32)
        return F.softcap(back, 3.0) + F.softcap(x_TD.split(32, dim=-1)[0], 3.0)

    net = Net(body)
    graph = traced(net)
    assert simplify_views.run(graph, FLOAT32).changed > 0
    assert ops(graph) == ["embedding", "softcap", "softcap", "aten.add.Tensor", "take_rows"]
    # Only now it shows that both are the same.
    assert cse.run(graph, FLOAT32).changed == 1
    check_same(net, graph)


def test_a_reshape_of_a_reshape_is_one() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        return F.softcap(self.embed(ids).view(-1, 2, 16).view(-1, 4, 8), 3.0).view(-1, 32)

    net = Net(body)
    graph = traced(net)
    assert simplify_views.run(graph, FLOAT32).changed == 1
    assert ops(graph).count("aten.view.default") == 2
    check_same(net, graph)


def test_views_of_parts_stay() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        a, b = self.wide(self.embed(ids)).split(32, dim=-1)
        return a + b

    net = Net(body, wide=nn.Linear(32, 64))
    graph = traced(net)
    before = ops(graph)
    assert simplify_views.run(graph, FLOAT32).changed == 0
    assert ops(graph) == before


def test_equal_calls_are_one_and_others_are_not() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = self.embed(ids)
        return F.softcap(x_TD, 3.0) + F.softcap(x_TD, 3.0) * 2.0 + F.softcap(x_TD, 2.0)

    net = Net(body)
    graph = traced(net)
    report = cse.run(graph, FLOAT32)
    assert (report.matched, report.changed) == (1, 1)
    assert ops(graph).count("softcap") == 2
    check_same(net, graph)


def test_weights_made_alike_are_one() -> None:
    from pelton.ir.recipe import Full

    net = Net(
        lambda self, ids, positions: self.a(self.embed(ids)) + self.b(self.embed(ids)),
        a=nn.RMSNorm(32, eps=1e-6),
        b=nn.RMSNorm(32, eps=1e-6),
    )
    graph = traced(net)
    assert cse.run(graph, FLOAT32).changed == 1  # the embedding alone
    with torch.no_grad():
        net.a.weight.fill_(1.0), net.b.weight.fill_(1.0)
    graph.recipes |= {"a.weight": Full(32, 1.0), "b.weight": Full(32, 1.0)}
    assert cse.run(graph, FLOAT32).changed == 2
    assert ops(graph).count("rms_norm") == 1
    check_same(net, graph)


def test_reads_of_a_cache_are_equal_only_without_a_write_in_between() -> None:
    graph = trace(create(zoo.llama(num_hidden_layers=1)), max_seq_len=64, block_size=4)
    attention = next(n for n in graph.calls if op_name(n) == "paged_attention")
    write = next(n for n in graph.calls if op_name(n) == "kv_write")
    copies = [
        graph.insert_call("paged_attention", attention.args, like=attention, before=attention),
        graph.insert_call("paged_attention", attention.args, like=attention, before=write),
    ]
    before = effects(graph)
    assert attention.args[0] in graph.calls
    report = cse.run(graph, FLOAT32)
    assert report.changed == 1
    assert copies[1] in graph.calls
    assert attention not in graph.calls or copies[0] not in graph.calls
    assert effects(graph) == before


def test_equal_writes_stay_two() -> None:
    graph = trace(create(zoo.llama(num_hidden_layers=1)), max_seq_len=64, block_size=4)
    write = next(n for n in graph.calls if op_name(n) == "kv_write")
    graph.insert_call("kv_write", write.args, like=write, before=write)
    cse.run(graph, FLOAT32)
    dead_code.run(graph, FLOAT32)
    assert len(effects(graph)) == 2


#: What a random program may do to a value of its list: (name, a step from values to a value).
STEPS: dict[str, Any] = {
    "softcap": lambda self, v, i, j: F.softcap(v[i], 1.0 + j % 2),
    "scale": lambda self, v, i, j: v[i] * (1.0 + j % 2),
    "add": lambda self, v, i, j: v[i] + v[j],
    "norm": lambda self, v, i, j: self.norm(v[i]),
    "there and back": lambda self, v, i, j: v[i].view(-1, 4, 8).view(-1, 2, 16).view(-1, 32),
    "half": lambda self, v, i, j: F.gated_activation(*self.wide(v[i]).split(32, dim=-1), "silu"),
    "constant": lambda self, v, i, j: v[i] + F.rope_cos_sin(self.positions, self.rope.inv_freq * 2.0, 1.0),
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9
)


@settings(max_examples=25, deadline=None)
@given(program=PROGRAMS, result=st.integers(0, 9))
def test_random_networks_keep_their_results_bit_for_bit(program: Any, result: int) -> None:
    """And a second round of the same passes finds nothing more."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        self.positions = positions
        values = [self.embed(ids), self.embed(positions)]
        for name, i, j in program:
            values.append(STEPS[name](self, values, i % len(values), j % len(values)))
        return values[-1 - result % len(values)] + values[-1]

    net = Net(body, norm=nn.RMSNorm(32, eps=1e-6), wide=nn.Linear(32, 64), rope=Rotations())
    graph = traced(net)
    passes = (constant_folding, simplify_views, cse, dead_code)
    for each in passes:
        each.run(graph, FLOAT32)
        verify(graph)
    check_same(net, graph)
    assert [each.run(graph, FLOAT32).changed for each in passes] == [0, 0, 0, 0]


@pytest.mark.parametrize("make", [zoo.llama, zoo.gemma3])
def test_a_model_without_redundancy_is_left_as_it_is(make: Any) -> None:
    graph = trace(create(make()), max_seq_len=64, block_size=4)
    before = ops(graph)
    for each in (constant_folding, simplify_views, cse, dead_code):
        assert each.run(graph, FLOAT32).changed == 0, each
    assert ops(graph) == before
