"""Fields of a ``quantization_config``, checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pelton.errors import CheckpointError


class Settings:
    """A ``quantization_config``; every getter raises ``CheckpointError`` naming file and field."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def get(self, *keys: str) -> Any:
        """The first of ``keys`` that is there; None where none is."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def integer(self, *keys: str, default: int | None = None, among: Iterable[int] = ()) -> int:
        """A whole number."""
        value = self.get(*keys)
        value = default if value is None else value
        among = tuple(among)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(keys[0], value, "a whole number")
        if among and value not in among:
            raise self.wrong(keys[0], value, " or ".join(map(str, among)))
        return value

    def number(self, key: str, default: float) -> float:
        """A number of at least 0."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.wrong(key, value, "a number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def choice(self, *keys: str, known: Iterable[str], default: str | None = None) -> str:
        """One of ``known``, in lower case."""
        value = self.get(*keys)
        value = default if value is None else value
        known = tuple(known)
        if not isinstance(value, str) or value.lower() not in known:
            raise self.wrong(keys[0], value, "supported (supported: " + ", ".join(known) + ")")
        return value.lower()

    def names(self, *keys: str) -> tuple[str, ...]:
        """A list of texts; empty where there is none."""
        value = self.get(*keys)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(keys[0], value, "a list of names")
        return tuple(value)

    def table(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where there is none."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value

    def wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        """The error for a field with a value that cannot be."""
        return CheckpointError(f"{self.where}: {key} {value!r} is not {wanted}")

    def pattern(self, key: str, text: str) -> re.Pattern[str]:
        """A regular expression."""
        try:
            return re.compile(text)
        except re.error as error:
            raise self.wrong(key, text, f"a regular expression ({error})") from error
