"""permute_inputs: products with weights whose columns are stored in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pelton import nn
from pelton.ir.condition import SameValues
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Concat, PutColumns, Recipe, Scale, Source, TakeColumns, take_columns
from pelton.ir.tensors import HostTensor
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
