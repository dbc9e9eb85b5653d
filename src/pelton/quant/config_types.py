"""Whether what users put into a recipe's fields is of the fields' types: structs check nothing when made."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec

from pelton.errors import ConfigError

#: How a type is called.
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
    tuple: "a tuple of texts",
    dict: "a dict of texts",
}


def check_types(config: msgspec.Struct, where: str = "") -> None:
    """Raise ``ConfigError`` naming the first field of ``config``, structs in it too, that holds a value of
    another type."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        try:
            found = msgspec.convert(value, hint)
        except msgspec.ValidationError:
            found = None
        # A dict converts to a struct, which it is not.
        if (
            (found is None and value is not None)
            or (value is None and not _takes_none(hint))
            or (isinstance(found, msgspec.Struct) and not isinstance(value, msgspec.Struct))
        ):
            raise ConfigError(f"{where}{name} must be {_described(hint)}, not {value!r}")
        if isinstance(value, msgspec.Struct):
            check_types(value, f"{where}{name}.")


def _takes_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _described(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_described, typing.get_args(hint)))
    if origin is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return _WORDS.get(origin or hint) or f"of type {hint.__name__}"
