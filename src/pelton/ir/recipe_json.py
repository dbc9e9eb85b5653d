"""Weight recipes as plain data, so that an engine can keep them: ``{"type": "Concat", "parts": [...]}``.

Works for every dataclass derived from ``Recipe``: fields are recipes, tuples, numbers, text or booleans.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from pelton.ir.recipe import Recipe


def to_data(recipe: Recipe) -> dict[str, Any]:
    """``recipe`` as what JSON can hold."""
    fields = dataclasses.fields(recipe)
    return {"type": type(recipe).__name__} | {f.name: _data(getattr(recipe, f.name)) for f in fields}


def from_data(data: Any) -> Recipe:
    """Undo ``to_data``. Raises ``ValueError`` saying what is wrong with ``data``."""
    if not isinstance(data, Mapping) or not isinstance(data.get("type"), str):
        raise ValueError(f"{data!r:.60} is no recipe")
    kinds = _kinds(Recipe)
    if data["type"] not in kinds:
        raise ValueError(f"there is no recipe {data['type']!r:.60}")
    kind = kinds[data["type"]]
    names = {f.name for f in dataclasses.fields(kind)}
    if names != data.keys() - {"type"}:
        raise ValueError(f"recipe {data['type']} has fields {', '.join(sorted(map(str, data)))}")
    values = {name: _value(data[name]) for name in names}
    for name, hint in typing.get_type_hints(kind).items():
        if name in names and not _fits(values[name], hint):
            raise ValueError(f"recipe {data['type']} has {data[name]!r:.60} as {name}")
    return kind(**values)


def _data(value: Any) -> Any:
    if isinstance(value, Recipe):
        return to_data(value)
    if isinstance(value, tuple):
        return [_data(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str), f"{value!r} in a recipe"
    return value


def _value(data: Any) -> Any:
    if isinstance(data, Mapping):
        return from_data(data)
    if isinstance(data, list | tuple):
        return tuple(_value(item) for item in data)
    return data


def _fits(value: Any, hint: Any) -> bool:
    """Whether a field annotated as ``hint`` may have ``value``."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if arguments[-1:] == (...,):
            arguments = arguments[:1] * len(value) if isinstance(value, tuple) else ()
        if not value or not isinstance(value, tuple) or len(value) != len(arguments):
            return False
        return all(_fits(item, part) for item, part in zip(value, arguments, strict=True))
    if arguments:  # a union
        return any(_fits(value, part) for part in arguments)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _kinds(base: type[Recipe]) -> dict[str, type[Recipe]]:
    found: dict[str, type[Recipe]] = {}
    for kind in base.__subclasses__():
        found |= {kind.__name__: kind} | _kinds(kind)
    return found
