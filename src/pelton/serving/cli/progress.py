"""What commands tell while they prepare a model: to standard error, in bars where it is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pelton.engine.config import BuildConfig

if TYPE_CHECKING:
    from pelton.serving.engine_cache import ResolvedModel
    from pelton.serving.llm import LLM

#: ``progress(stage, done, total)`` of ``pelton.build``; ``total`` is 0 where it is not known.
Progress = Callable[[str, int, int], None]


def notify(sentence: str) -> None:
    """A line on standard error."""
    print(f"pelton: {sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def build_progress(quiet: bool = False) -> Iterator[Progress | None]:
    """A progress callback: bars in a terminal with rich, a line per stage elsewhere, None when quiet."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and (bars := _bars()) is not None:
        with bars:
            tasks: dict[str, Any] = {}

            def show(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    for before in tasks.values():  # a stage ends where the next begins
                        bars.update(before, total=1, completed=1)
                    tasks[stage] = bars.add_task(stage, total=total or None)
                bars.update(tasks[stage], completed=done, total=total or None)

            yield show
    else:
        seen: set[str] = set()

        def line(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                print(f"  {stage}", file=sys.stderr, flush=True)

        yield line


def _bars() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("  {task.description:<12}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class _LazyProgress:
    """Starts showing at the first call, so that an engine that exists shows nothing at all."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._show: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._show is None:
            self._show = self._stack.enter_context(build_progress())
            assert self._show is not None
        self._show(stage, done, total)

    def close(self) -> None:
        """Remove the bars."""
        self._stack.close()


def resolve(model: str, config: BuildConfig) -> ResolvedModel:
    """The engine of ``model``, built with bars if it has to be."""
    from pelton.serving.engine_cache import resolve_model

    progress = _LazyProgress()
    try:
        return resolve_model(model, config, progress=progress, notify=notify)
    finally:
        progress.close()


def open_llm(model: str, config: BuildConfig, trust: bool = False) -> LLM:
    """``LLM`` with the same."""
    from pelton.serving.llm import LLM

    progress = _LazyProgress()
    try:
        return LLM(model, build=config, progress=progress, notify=notify, trust=trust)
    finally:
        progress.close()
