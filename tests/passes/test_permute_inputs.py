"""permute_inputs: products with weights whose columns are stored in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pelton import nn
from pelton.ir.condition import SameValues
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import (
    Concat,
    PutColumns,
    Recipe,
    Rows,
    Scale,
    Source,
    TakeColumns,
    TakeRows,
    rows,
    take_columns,
)
from pelton.ir.tensors import HostTensor
from pelton.nn import functional as F
from pelton.passes import PassContext, permute_inputs
from tests.passes.support import FLOAT32, Net, ops, traced

WIDTH = 32
ORDER = np.random.default_rng(0).permutation(WIDTH).astype(np.int32)


def read(name: str) -> HostTensor:
    if name.startswith("order"):
        order = ORDER[::-1].copy() if name.endswith("other") else ORDER
        return HostTensor("int32", order.shape, order)
    values = np.random.default_rng(list(name.encode())).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    return HostTensor("float32", values.shape, values)


def context(orders: dict[str, str], **changes: Any) -> PassContext:
    """``orders``: of the weights that have one, by name."""

    def source(name: str) -> Recipe:
        return PutColumns(Source(name), Source(orders[name])) if name in orders else Source(name)

    def resolve(recipe: Recipe) -> Recipe:
        return recipe.resolve(source)

    found = replace(
        FLOAT32,
        resolve=resolve,
        read=lambda recipe: evaluate(resolve(recipe), read),
        stored_quant=lambda recipe, dimensions: "int4_g32",
    )
    return replace(found, **changes)


def two_products() -> Net:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x = self.embed(ids)
        return self.a(x) + self.b(x)

    return Net(body, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))


def test_put_columns_undo_taken_ones() -> None:
    weight = read("w")
    put = evaluate(PutColumns(Source("w"), Source("order")), read)
    assert (put.data[:, ORDER] == weight.data).all()
    again = evaluate(TakeColumns(PutColumns(Source("w"), Source("order")), Source("order")), read)
    assert (again.data == weight.data).all()
    assert take_columns(PutColumns(Source("w"), Source("order")), Source("order")) == Source("w")
    assert TakeColumns(Source("w"), Source("order")).resolve(
        lambda name: PutColumns(Source(name), Source("order")) if name == "w" else Source(name)
    ) == Source("w")


def test_rows_of_taken_columns_are_rows_of_what_is_stored() -> None:
    half = rows(TakeColumns(Source("w"), Source("order")), 0, 16)
    assert half.resolve(
        lambda name: PutColumns(Source(name), Source("order")) if name == "w" else Source(name)
    ) == Rows(Source("w"), 0, 16)


def test_products_of_one_input_share_what_is_taken_of_it() -> None:
    graph = traced(two_products())
    ctx = context({"a.weight": "order.a", "b.weight": "order.b"})
    report = permute_inputs.run(graph, ctx)
    assert (report.matched, report.changed) == (2, 2)
    assert ops(graph).count("take_columns") == 1
    for name in ("a.weight", "b.weight"):
        assert ctx.resolve(graph.recipes[name]) == Source(name)
    assert graph.recipes["a.input_order"] == Source("order.a")


def test_orders_that_differ_are_taken_apart() -> None:
    graph = traced(two_products())
    report = permute_inputs.run(graph, context({"a.weight": "order.a", "b.weight": "order.other"}))
    assert report.changed == 2
    assert ops(graph).count("take_columns") == 2


def test_stacked_weights_of_one_order_say_what_they_relied_on() -> None:
    graph = traced(two_products())
    graph.recipes["a.weight"] = Concat((Source("q"), Source("k")))
    report = permute_inputs.run(graph, context({"q": "order.q", "k": "order.k"}))
    assert report.changed == 1
    assert report.conditions == (
        SameValues(a=Source("order.q"), b=Source("order.k"), tolerance=0, why="permute_inputs"),
    )


@pytest.mark.parametrize(
    ("recipe", "orders", "why"),
    [
        (Concat((Source("q"), Source("k"))), {"q": "order.q", "k": "order.other"}, "in different orders"),
        (Concat((Source("q"), Source("k"))), {"q": "order.q"}, "in different orders"),
        (Scale(Source("q"), 3.0), {"q": "order.q"}, "its columns are computed with"),
    ],
)
def test_left_alone(recipe: Recipe, orders: dict[str, str], why: str) -> None:
    graph = traced(two_products())
    graph.recipes["a.weight"] = recipe
    report = permute_inputs.run(graph, context(orders))
    assert report.changed == 0
    ((name, said),) = report.skipped
    assert name == "a.weight" and why in said
    assert "take_columns" not in ops(graph)


def test_a_target_without_the_kernel_keeps_the_dequantised_weight() -> None:
    graph = traced(two_products())
    report = permute_inputs.run(graph, context({"a.weight": "order.a"}, has_tactic=lambda spec: False))
    assert report.skipped == (("a.weight", "the target has no kernel for take_columns"),)


def test_a_weight_that_is_stored_dense_is_put_in_order_instead() -> None:
    graph = traced(two_products())
    dense = context({"a.weight": "order.a"}, stored_quant=lambda recipe, dimensions: "bfloat16")
    report = permute_inputs.run(graph, dense)
    assert report.skipped == (("a.weight", "it is stored as bfloat16, with its columns in order"),)


def gated(stacked: bool, bias: bool, shared: bool) -> Net:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x = self.embed(ids)
        gate, up = self.both(x).split(WIDTH, dim=-1) if stacked else (self.gate(x), self.up(x))
        y = F.gated_activation(gate, up, "silu")
        z = self.down(y)
        return z + y if shared else z

    down = nn.Linear(WIDTH, WIDTH)
    if stacked:
        return Net(body, both=nn.Linear(WIDTH, 2 * WIDTH, bias=bias), down=down)
    return Net(body, gate=nn.Linear(WIDTH, WIDTH, bias=bias), up=nn.Linear(WIDTH, WIDTH), down=down)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_what_an_activation_gives_is_reordered_by_the_rows_before_it(stacked: bool, bias: bool) -> None:
    graph = traced(gated(stacked, bias, shared=False))
    report = permute_inputs.run(graph, context({"down.weight": "order.down"}))
    assert (report.matched, report.changed) == (1, 1)
    assert "take_columns" not in ops(graph)
    order = Source("order.down")
    if stacked:
        halves = ((0, WIDTH), (WIDTH, 2 * WIDTH))
        parts = tuple(TakeRows(Rows(Source("both.weight"), *half), order) for half in halves)
        assert graph.recipes["both.weight"] == Concat(parts)
    else:
        assert graph.recipes["gate.weight"] == TakeRows(Source("gate.weight"), order)
        assert graph.recipes["up.weight"] == TakeRows(Source("up.weight"), order)
    biases = [recipe for name, recipe in graph.recipes.items() if name.endswith("bias")]
    assert len(biases) == bias and all("order.down" in recipe.sources() for recipe in biases)


def test_what_is_read_elsewhere_too_is_not_reordered() -> None:
    graph = traced(gated(stacked=True, bias=False, shared=True))
    report = permute_inputs.run(graph, context({"down.weight": "order.down"}))
    assert report.changed == 1
    assert ops(graph).count("take_columns") == 1
    assert graph.recipes["both.weight"] == Source("both.weight")
