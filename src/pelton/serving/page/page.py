"""Makes the page: one file, with everything in it, from an engine and (if there is one) its profile."""

from __future__ import annotations

from importlib import resources
from typing import Any

from pelton.engine.artifact import Engine
from pelton.engine.cost import StepShape, step_costs
from pelton.engine.difference import quality_facts
from pelton.engine.profile import PhaseProfile
from pelton.engine.resources import human_bytes
from pelton.engine.summary import lifetimes, settings, summarise
from pelton.serving.page.plots import HEIGHT, WIDTH, Bar, bars, legend, shares, spans

#: Keys of the decode step whose bytes are plotted where nothing was measured.
DECODE_KEYS = 512


def render(engine: Engine, phases: list[PhaseProfile] | None = None) -> str:
    """The page as text. ``phases``: what ``profile`` measured; without, bytes are plotted for times."""
    import jinja2

    template = resources.files("pelton.serving.page").joinpath("engine.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(**_context(engine, phases))


def _context(engine: Engine, phases: list[PhaseProfile] | None) -> dict[str, Any]:
    summary, report = summarise(engine), engine.report()
    plan, config = engine.plan, engine.config
    names = [f"{i} {ins.name}" for i, ins in enumerate(plan.instructions)]
    ops = [ins.op for ins in plan.instructions]
    memory = _memory(engine)
    return {
        "engine": engine,
        "model": config.model,
        "size": human_bytes(engine.nbytes),
        "settings": settings(engine),
        "summary": summary,
        "report": report,
        "passes": report.get("passes") or [],
        "tactics": report.get("tactics") or [],
        "quality": quality_facts(report),
        "notes": report.get("notes") or [],
        "memory": memory,
        "memory_bars": shares([(name, size, human_bytes(size)) for name, size in memory]),
        "arena_bars": bars(
            summary.arena,
            [f"{n}: {human_bytes(v)}" for n, v in zip(names, summary.arena, strict=True)],
            ops,
        ),
        "layout": _layout(engine),
        "arena_peak": human_bytes(max(summary.arena, default=0)),
        "times": _times(engine, phases, names, ops),
        "legend": legend(ops),
        "width": WIDTH,
        "height": HEIGHT,
        "human_bytes": human_bytes,
    }


def _layout(engine: Engine) -> list[Bar]:
    """Where each intermediate tensor lies in the arena, and from when to when."""
    plan = engine.plan
    parts = []
    for index, (first, last) in lifetimes(plan).items():
        b = plan.buffers[index]
        where = f"{human_bytes(b.nbytes)} at {b.offset}, instructions {first} to {last}"
        parts.append((first, last, b.offset, b.nbytes, f"{b.name}: {where}"))
    return spans(parts, len(plan.instructions), plan.arena_bytes)


def _memory(engine: Engine) -> list[tuple[str, int]]:
    memory, build = engine.config.memory, engine.config.build
    assert build.max_batch_size and build.max_seq_len
    return [
        ("weights", memory.weights),
        ("KV cache at the limits", memory.kv_bytes_per_token * build.max_batch_size * build.max_seq_len),
        ("arena", memory.arena),
        ("workspace", memory.workspace),
    ]


def _times(
    engine: Engine, phases: list[PhaseProfile] | None, names: list[str], ops: list[str]
) -> list[dict[str, Any]]:
    """A plot a phase: microseconds by instruction; or the bytes of a decode step, the floor of its time."""
    if phases:
        return [
            {
                "title": f"{p.phase}: {p.plain * 1e3:.2f} ms",
                "bars": bars(
                    [float(s) for s in p.seconds],
                    [f"{n}: {s * 1e6:.1f} µs" for n, s in zip(names, p.seconds, strict=True)],
                    ops,
                ),
            }
            for p in phases
        ]
    keys = min(DECODE_KEYS, engine.config.build.max_seq_len or DECODE_KEYS)
    costs = step_costs(engine.plan, StepShape(new=(1,), keys=(keys,), logits=1))
    total = sum(c.memory for c in costs)
    return [
        {
            "title": f"bytes read in a decode step of one sequence at {keys} tokens: {human_bytes(total)}",
            "bars": bars(
                [float(c.memory) for c in costs],
                [f"{n}: {human_bytes(c.memory)}" for n, c in zip(names, costs, strict=True)],
                ops,
            ),
        }
    ]
