"""``weights.json``: how each weight of an engine is made from checkpoint tensors, so that it can be made
again from others (``pelton refit``). The plan says how it is stored: type, layout, shape."""

from __future__ import annotations

from typing import Any

import msgspec

from pelton.ir.condition import SameValues
from pelton.ir.recipe import Recipe
from pelton.ir.recipe_json import from_data, to_data

#: Keys of a checkpoint's config that say nothing of how the model computes.
DESCRIPTIVE = (
    "_name_or_path",
    "auto_map",
    "dtype",
    "initializer_range",
    "pretraining_tp",
    "torch_dtype",
    "transformers_version",
    "unsloth_version",
    "use_cache",
)
_DESCRIPTIVE_ENDINGS = ("_token_id", "dropout", "_pdrop")


class StoredCondition(msgspec.Struct, frozen=True, kw_only=True):
    """``ir.condition.SameValues`` as data."""

    a: dict[str, Any]
    b: dict[str, Any]
    tolerance: float
    why: str


class WeightSources(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``weights.json``."""

    checkpoint: str
    """Name of the checkpoint whose weights are in the engine."""
    config: dict[str, Any]
    """Its configuration, without what does not change how the model computes."""
    recipes: dict[str, dict[str, Any]]
    """By weight of the plan, over tensors of the Hugging Face model. Constants have none."""
    shapes: dict[str, tuple[int, ...]]
    """Of the checkpoint tensors that recipes name."""
    conditions: tuple[StoredCondition, ...] = ()
    """What passes relied on."""


def describe(
    checkpoint: str,
    config: dict[str, Any],
    recipes: dict[str, Recipe],
    shapes: dict[str, tuple[int, ...]],
    conditions: tuple[SameValues, ...],
) -> WeightSources:
    """The ``WeightSources`` of an engine."""
    return WeightSources(
        checkpoint=checkpoint,
        config=relevant(config),
        recipes={name: to_data(recipe) for name, recipe in recipes.items()},
        shapes=shapes,
        conditions=tuple(
            StoredCondition(a=to_data(c.a), b=to_data(c.b), tolerance=c.tolerance, why=c.why)
            for c in conditions
        ),
    )


def recipes_of(sources: WeightSources) -> dict[str, Recipe]:
    """The recipes by weight. Raises ``ValueError`` for one that this Pelton cannot read."""
    return {name: from_data(data) for name, data in sources.recipes.items()}


def conditions_of(sources: WeightSources) -> tuple[SameValues, ...]:
    """The conditions. Raises ``ValueError`` as ``recipes_of``."""
    return tuple(
        SameValues(a=from_data(c.a), b=from_data(c.b), tolerance=c.tolerance, why=c.why)
        for c in sources.conditions
    )


def relevant(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` without null, and without what does not change how the model computes; as JSON has it."""
    kept = {
        key: value
        for key, value in config.items()
        if value is not None and key not in DESCRIPTIVE and not key.endswith(_DESCRIPTIVE_ENDINGS)
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kept, order="sorted"))
    return plain


def difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """The first key in which two relevant configs differ, with both values; None when they agree."""
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            return f"{key} is {_shown(b, key)} and not {_shown(a, key)}"
    return None


def _shown(config: dict[str, Any], key: str) -> str:
    return f"{config[key]!r:.60}" if key in config else "absent"
