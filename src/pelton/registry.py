"""A named table with errors that list what exists: models, layouts, quantisations."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from pelton.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Values by name; ``kind`` is the noun used in messages ("architecture", "layout")."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, value: T) -> T:
        """Register ``value``; a second one of the same name is a programming error."""
        assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
        self._entries[name] = value
        return value

    def __getitem__(self, name: str) -> T:
        """The entry; raises ``ConfigError`` naming the nearest known name."""
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(sorted(self._entries))})")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
