"""What was taken of a GPU, so that it can be given back where making something of it failed halfway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: What has been taken since ``given_back_on_error`` was entered.
_taken: list[Any] | None = None


@contextmanager
def given_back_on_error() -> Iterator[None]:
    """Within, memory, streams, events and kernels that were made are closed again when an error leaves.

    For one thread at a time, around what makes many of them.
    """
    global _taken
    outer, _taken = _taken, []
    try:
        yield
    except BaseException:
        for thing in reversed(_taken):
            thing.close()
        raise
    finally:
        _taken = outer


def note(thing: Any) -> None:
    """``thing``, which has a ``close``, was taken."""
    if _taken is not None:
        _taken.append(thing)
