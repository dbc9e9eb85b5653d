"""Engines on tasks of EleutherAI's lm-evaluation-harness: which tasks there are, and what engines score.

The harness does the work: data sets, prompts, metrics, standard errors. Import fails without it, as
``lm_eval.py``'s does.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import msgspec

from pelton.engine.artifact import open_engine
from pelton.errors import ConfigError, PeltonError
from pelton.serving.lm_eval import PeltonLM


class Score(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of a task, or of a group of tasks together."""

    task: str
    metric: str
    """As the harness calls it, such as ``acc``; ``exact_match (strict-match)`` where it filters answers."""
    value: float
    stderr: float | None = None
    """Standard error; None where the harness has none for the metric."""
    shots: int
    """Examples before a question. A task that says 0 itself keeps it."""
    documents: int
    chat: bool = False
    """Whether questions were put through the model's chat template."""
    against: float | None = None
    """The other engine's value."""
    against_stderr: float | None = None


class TaskScores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine scored, beside another where one was given."""

    engine: str
    harness: str
    """The version of ``lm_eval``."""
    limit: int | None = None
    """Documents of each task that were asked at most."""
    against: str = ""
    scores: tuple[Score, ...]

    def title(self) -> str:
        """Of the table."""
        first = f", the first {self.limit} documents of each task" if self.limit is not None else ""
        chat = ", through the chat template" if any(s.chat for s in self.scores) else ""
        return f"{self.engine} on tasks of lm_eval {self.harness}{first}{chat}"

    def header(self) -> tuple[str, ...]:
        """Of the table's columns."""
        values = (self.engine, "stderr", self.against, "stderr") if self.against else ("value", "stderr")
        return ("task", "metric", *values, "shots", "documents")

    def rows(self) -> list[tuple[Any, ...]]:
        """For people."""
        rows: list[tuple[Any, ...]] = []
        for s in self.scores:
            values = [s.value, s.stderr, *((s.against, s.against_stderr) if self.against else ())]
            shown = ["-" if value is None else f"{value:.4f}" for value in values]
            rows.append((s.task, s.metric, *shown, s.shots, s.documents))
        return rows


class Tasks:
    """Tasks by the harness's names (tasks, groups, tags, patterns such as ``arc_*``) or YAML files, with
    their data sets.

    Raises ``ConfigError`` for a name that the harness does not know, and a task that it cannot load.
    """

    def __init__(self, names: Sequence[str]) -> None:
        from lm_eval import __version__
        from lm_eval.tasks import TaskManager

        self.harness: str = __version__
        self._manager = TaskManager()
        self._tasks: list[Any] = []
        for found in dict.fromkeys(found for name in names for found in self._matching(name)):
            try:
                loaded = self._manager.load([found])
            except Exception as error:  # whatever code of tasks, data sets and the network raises
                raise ConfigError(f"the harness cannot load task {found}: {_reason(error)}") from error
            for task in loaded["tasks"].values():
                _check(task)
            groups = list(loaded.get("groups", {}).values())
            # A group is loaded with all that is in it, itself first.
            self._tasks += groups[:1] or loaded["tasks"].values()
        try:
            self._manager.load(self._tasks)
        except ValueError as error:  # a task that is in two of them
            raise ConfigError(f"the harness cannot run these tasks together: {_reason(error)}") from error

    def score(
        self,
        engine: Path,
        *,
        shots: int | None = None,
        limit: int | None = None,
        chat: bool = False,
        trust: bool = False,
    ) -> tuple[Score, ...]:
        """What ``engine`` scores, groups before their tasks.

        ``shots``: examples before a question, where the task does not say 0 itself (None: what it says);
        ``limit``: documents of each task at most; ``chat``: through the model's chat template.
        Raises ``PeltonError`` where the harness fails.
        """
        from lm_eval import simple_evaluate

        lm = PeltonLM(str(engine), trust=trust)
        try:
            with _silent_children():
                found = simple_evaluate(
                    lm,
                    tasks=list(self._tasks),
                    num_fewshot=shots,
                    limit=limit,
                    apply_chat_template=chat,
                    task_manager=self._manager,
                    log_samples=False,
                )
        except PeltonError:
            raise
        except Exception as error:
            if os.environ.get("PELTON_DEBUG"):
                raise
            raise PeltonError(f"the harness failed: {_reason(error)} (PELTON_DEBUG=1 shows where)") from error
        finally:
            lm.close()
        return _scores(found, chat)

    def _matching(self, name: str) -> list[str]:
        if found := self._manager.match_tasks([name]):
            return [str(task) for task in found]
        if Path(name).is_file():
            return [name]
        near = difflib.get_close_matches(name, self._manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "lm_eval ls tasks lists all."
        raise ConfigError(f"the harness has no task {name!r}, and no such file is there; {hint}")


def beside(scores: Sequence[Score], others: Sequence[Score]) -> tuple[Score, ...]:
    """``scores`` with what the other engine scored."""
    other = {(s.task, s.metric): s for s in others}
    return tuple(
        msgspec.structs.replace(
            s, against=other[s.task, s.metric].value, against_stderr=other[s.task, s.metric].stderr
        )
        for s in scores
    )


def keep(engine: Path, found: TaskScores) -> None:
    """Put what ``engine`` scored into its ``report.json``, in place of what these tasks gave before."""
    from pelton.builder.report_file import keep_quality

    names = {s.task for s in found.scores}
    quality: dict[str, Any] = dict[str, Any](open_engine(engine).report()).get("quality") or {}
    kept = [s for s in quality.get("tasks", ()) if s["task"] not in names]
    own = [msgspec.structs.replace(s, against=None, against_stderr=None) for s in found.scores]
    keep_quality(engine, tasks=[*kept, *msgspec.to_builtins(own)])


@contextlib.contextmanager
def _silent_children() -> Iterator[None]:
    """The harness asks git for the working folder's commit, and git complains where there is none."""
    os.set_inheritable(2, False)
    try:
        yield
    finally:
        os.set_inheritable(2, True)


def _check(task: Any) -> None:
    """What the harness would refuse only after an engine was built."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"task {task.task_name} runs code that the model writes; ask lm_eval itself for it")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"task {task.task_name} has images, and engines read text only")


def _reason(error: Exception) -> str:
    """One line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _scores(found: Any, chat: bool) -> tuple[Score, ...]:
    """From the harness's table, whose keys are ``METRIC,FILTER`` and ``METRIC_stderr,FILTER``."""
    results = found["results"]
    groups = [name for name in reversed(list(results)) if name in found.get("group_subtasks", {})]
    scores = []
    for name in dict.fromkeys((*groups, *results)):
        values = results[name]
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            scores.append(
                Score(
                    task=name,
                    metric=metric if kind == "none" else f"{metric} ({kind})",
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, Real) else None,
                    shots=int(found["n-shot"].get(name, 0)),
                    documents=int(values["sample_len"]),
                    chat=chat,
                )
            )
    return tuple(scores)
