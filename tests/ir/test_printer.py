"""Graphs, recipes and their differences as text."""

from __future__ import annotations

from pelton.ir.printer import condense, diff, recipe_text
from pelton.ir.recipe import AddScalar, Concat, Rows, Source


def test_recipes_read_as_the_expressions_they_are() -> None:
    recipe = Concat((Rows(Source("a.weight"), 0, 4), AddScalar(Source("b.weight"), 1.0)))
    assert recipe_text(recipe) == "Concat(Rows(a.weight, 0, 4), AddScalar(b.weight, 1.0))"


def test_hunks_of_equal_layers_stand_once() -> None:
    before = "\n".join(f"mul_{i} = mul(x.{i})\nkept\nkept\nkept" for i in range(4)) + "\nother\n"
    after = before.replace("mul(", "scale(").replace("other", "another")
    shown = condense(diff(before, after))
    assert [line for line in shown.splitlines() if "+" in line[:1] or "like" in line] == [
        "+mul_0 = scale(x.0)",
        "(and 3 like it)",
        "+another",
    ]
    assert condense("") == ""
