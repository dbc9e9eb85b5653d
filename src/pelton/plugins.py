"""Packages that extend Pelton, found through their entry points; each is imported when it is needed.

``pelton.models``: by architecture, the module that registers it. ``pelton.ops``: by namespace of ops, a
module with such ops or with tactics of them; ``pelton`` stands for Pelton's own ops.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from pelton.errors import ConfigError


def load(group: str, name: str) -> None:
    """Import what installed packages offer as ``name``. Raises ``ConfigError`` naming a broken package."""
    for entry in importlib.metadata.entry_points(group=group, name=name):
        try:
            entry.load()
        except Exception as error:
            package = getattr(entry, "dist", None)
            what = f"the package {package.name} {package.version}" if package else "a package"
            raise ConfigError(
                f"{what} offers {name} to Pelton ({group}), and {entry.value} cannot be loaded: "
                f"{type(error).__name__}: {error}; mend the package or uninstall it"
            ) from error


def package_of(function: Callable[..., Any]) -> tuple[str, str]:
    """(name, version) of the installed package that has the function's module; empty where none does."""
    top = function.__module__.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    return (names[0], importlib.metadata.version(names[0])) if names else ("", "")
