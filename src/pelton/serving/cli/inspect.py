"""``pelton inspect``: what is in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pelton.errors import ConfigError
from pelton.serving.cli.options import Command, trust_option
from pelton.serving.cli.progress import notify
from pelton.serving.cli.tables import show, table

if TYPE_CHECKING:
    from pelton.engine.artifact import Engine
    from pelton.engine.memory_monitor import DeclaredMemory, MemoryUse
    from pelton.engine.profile import PhaseProfile
    from pelton.engine.summary import Block, Summary

_BESIDES = "besides the mapped weights"


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton inspect model.engine
  pelton inspect model.engine --plan             every instruction
  pelton inspect model.engine --verify           read all files, compare their SHA-256
  pelton inspect model.engine --html report.html --measure
  pelton inspect model.engine --json | jq .memory""",
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--plan", "show_plan", is_flag=True, help="List every instruction with its tactics.")
@click.option("--verify", is_flag=True, help="Read all files and compare their SHA-256.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with everything to this file.")
@click.option("--measure", is_flag=True, help="Run it: times by instruction, memory declared and taken.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@trust_option
def inspect(
    engine: Path, show_plan: bool, verify: bool, html: Path | None, measure: bool, as_json: bool, trust: bool
) -> None:
    """Show what ENGINE is, was built for and needs: plan, tactics, passes, memory, quality."""
    from pelton.engine.artifact import open_engine

    opened = open_engine(engine, verify=verify)
    phases, used = _measure(opened, trust) if measure else (None, None)
    if html is not None:
        _write_page(opened, html, phases)
    elif as_json:
        record = _record(opened, show_plan, used)
        click.echo(msgspec.json.format(msgspec.json.encode(record)).decode())
    else:
        _print(opened, show_plan, verify, used)


def _write_page(engine: Engine, html: Path, phases: list[PhaseProfile] | None) -> None:
    from pelton.serving.page.page import render

    if html.is_dir():
        raise ConfigError(f"{html} is a folder; name the file to write")
    html.write_text(render(engine, phases), encoding="utf-8")
    notify(f"{html} has everything in it; open it in a browser.")


def _measure(engine: Engine, trust: bool) -> tuple[list[PhaseProfile], MemoryUse | None]:
    """A short run: prefill of 128 tokens (or what fits), 8 steps; and the session's memory after it."""
    import numpy as np

    from pelton.engine.profile import blocks_needed, phases, profile_session
    from pelton.engine.session import Session

    build = engine.config.build
    assert build.max_seq_len
    tokens = max(1, min(128, build.max_seq_len // 2))
    steps = min(8, build.max_seq_len - tokens)
    prompt = np.random.default_rng(0).integers(0, engine.config.model.vocab_size, tokens, dtype=np.int32)
    blocks = blocks_needed(engine.config, [prompt], steps)
    with Session(engine, kv_blocks=blocks, trust=trust) as session:
        found = phases(profile_session(session, [prompt], steps))
        return found, session.memory


def _declared(engine: Engine) -> DeclaredMemory | None:
    """What a session at the engine's limits declares; None on a GPU, whose free memory decides."""
    from pelton.engine.kv_cache import limit_blocks
    from pelton.engine.memory_monitor import declare
    from pelton.engine.resources import cores

    config = engine.config
    if config.build.target != "cpu":
        return None
    return declare(config, limit_blocks(config), config.build.threads or cores())


def _memory_record(memory: DeclaredMemory) -> dict[str, int]:
    return {**msgspec.structs.asdict(memory), "declared": memory.declared}


def _record(engine: Engine, show_plan: bool, used: MemoryUse | None) -> dict[str, Any]:
    from pelton.engine.summary import summarise

    summary = summarise(engine)
    record = {
        "path": str(engine.path),
        "engine_id": engine.engine_id,
        "nbytes": engine.nbytes,
        "manifest": msgspec.to_builtins(engine.manifest),
        **msgspec.to_builtins(engine.config),
        "instructions": len(engine.plan.instructions),
        "tactics": msgspec.to_builtins(summary.ops),
        "weights": msgspec.to_builtins(summary.weights),
        "blocks": msgspec.to_builtins(summary.blocks),
        "arena_live_bytes": list(summary.arena),
        "report": engine.report(),
    }
    if (declared := _declared(engine)) is not None:
        record["declared_memory"] = _memory_record(declared)
    if used is not None:
        record["measured_memory"] = _memory_record(used)
    if show_plan:
        record["plan"] = msgspec.to_builtins(engine.plan)
    return record


def _print(engine: Engine, show_plan: bool, verified: bool, used: MemoryUse | None) -> None:
    from pelton.engine.resources import human_bytes
    from pelton.engine.summary import settings, summarise

    summary, report = summarise(engine), engine.report()
    state = ", every file verified" if verified else ""
    click.echo(f"{engine.path}  {human_bytes(engine.nbytes)}{state}\n")
    _print_model(engine)
    click.echo("\n" + table("built for", list(settings(engine).items())))
    _print_memory(engine, summary, used)
    click.echo(f"\nplan: {len(engine.plan.instructions)} instructions")
    for block in summary.blocks:
        click.echo(_block(block))
    if show_plan:
        click.echo("\n" + _plan(engine) + "\n")
        _show_buffers(engine)
    click.echo()
    rows = [
        (
            o.op,
            o.tactic,
            _upto(o.max_tokens),
            o.instructions,
            human_bytes(o.weight_bytes) if o.weight_bytes else "",
        )
        for o in summary.ops
    ]
    show("tactics", rows, header=("op", "tactic", "tokens", "instructions", "weights"))
    _print_report(report)
    made = engine.manifest
    click.echo(f"\nmade by Pelton {made.pelton_version}, format {made.format_version}, for {made.target}")


def _print_model(engine: Engine) -> None:
    model = engine.config.model
    click.echo(
        table(
            "model",
            [
                ("name", model.name),
                ("architecture", model.architecture),
                ("parameters", f"{model.num_parameters:,}"),
                ("layers", model.num_layers),
                ("hidden size", model.hidden_size),
                ("vocabulary", f"{model.vocab_size:,}"),
                ("positions", f"{model.max_position_embeddings:,}"),
                ("end tokens", ", ".join(map(str, model.eos_token_ids)) or "none"),
                ("defaults", ", ".join(f"{k} {v}" for k, v in model.generation.items()) or "none"),
            ],
        )
    )
    for i, group in enumerate(model.kv_groups):
        window = f", window {group.window}" if group.window else ""
        click.echo(
            f"  KV group {i}: {len(group.layers)} layers, "
            f"{group.num_kv_heads} heads of {group.head_dim}{window}"
        )


def _print_memory(engine: Engine, summary: Summary, used: MemoryUse | None) -> None:
    from pelton.engine.resources import human_bytes

    build, memory = engine.config.build, engine.config.memory
    assert build.max_batch_size and build.max_seq_len
    declared = _declared(engine)
    rows = [
        ("weights", human_bytes(memory.weights)),
        ("arena", f"{human_bytes(memory.arena)}, {human_bytes(max(summary.arena, default=0))} alive at once"),
        ("workspace", human_bytes(memory.workspace)),
        ("inputs", f"{human_bytes(memory.inputs)} of a step's arrays"),
        ("KV per token", human_bytes(memory.kv_bytes_per_token)),
        (
            "KV at the limits",
            human_bytes(memory.kv_bytes_per_token * build.max_batch_size * build.max_seq_len),
        ),
    ]
    if declared is not None:
        rows.append(("overhead", f"{human_bytes(declared.overhead)} of threads, tables, Python objects"))
        rows.append(("declared", f"{human_bytes(declared.declared)} at the limits, {_BESIDES}"))
    if used is not None:
        what = f"{human_bytes(used.declared)} declared, {human_bytes(used.growth)} taken"
        rows.append(("short run", f"{what}, {_BESIDES}"))
    click.echo("\n" + table("memory", rows))
    click.echo()
    weights = [
        (w.quant, w.layout, w.tensors, f"{w.values:,}", human_bytes(w.nbytes)) for w in summary.weights
    ]
    show("weights", weights, header=("type", "layout", "tensors", "values", "bytes"))


def _block(block: Block) -> str:
    times = f" (x{block.layers})" if block.layers > 1 else ""
    rows = []
    for i in block.instructions:
        outputs = ", ".join(i.outputs) or "KV cache"
        rows.append((i.op, ", ".join((*i.inputs, *i.weights)), "->", outputs))
    return table(f"  {block.label}{times}", rows)


def _plan(engine: Engine) -> str:
    operands, lines = engine.plan.operands, []
    for i, instruction in enumerate(engine.plan.instructions):
        names = [operands[o].name if o >= 0 else "-" for o in instruction.inputs]
        outs = [operands[o].name for o in instruction.outputs]
        tactics = ", ".join(f"{c.tactic} {_upto(c.max_tokens)}" for c in instruction.tactics) or "reference"
        lines.append(f"{i:4} {', '.join(outs)} = {instruction.op}({', '.join(names)})  [{tactics}]")
    return "\n".join(lines)


def _show_buffers(engine: Engine) -> None:
    """The arena's layout."""
    from pelton.engine.summary import lifetimes

    rows = []
    for index, (first, last) in lifetimes(engine.plan).items():
        b = engine.plan.buffers[index]
        rows.append(
            (b.name, f"{b.dtype}[{', '.join(map(str, b.shape))}]", b.offset, b.nbytes, f"{first}-{last}")
        )
    show("arena", rows, header=("tensor", "type", "offset", "bytes", "alive"))


def _print_report(report: dict[str, Any]) -> None:
    """What the build kept, by its known parts; an older engine may lack some."""
    from pelton.engine.difference import quality_facts

    timed = [
        (
            t["op"],
            t.get("shape", ""),
            name,
            _upto(t.get("max_tokens", 0)),
            f"{us:.1f}",
            "taken" if name == t["tactic"] else "",
        )
        for t in report.get("tactics") or []
        for name, us in sorted(t.get("microseconds", {}).items(), key=lambda e: e[1])
    ]
    if timed:
        click.echo()
        show("times when built", timed, header=("op", "shape", "tactic", "tokens", "us", ""))
    passes = [_pass_row(p) for p in report.get("passes") or []]
    if passes:
        click.echo()
        show("passes", passes, header=("pass", "matched", "changed", "why not"))
    if quality := quality_facts(report):
        rows = [(name, f"{v:.6g}" if isinstance(v, float) else v) for name, v in quality.items()]
        click.echo("\n" + table("quality", rows))
    for note in report.get("notes") or []:
        click.echo(f"  note: {note}")


def _pass_row(p: dict[str, Any]) -> tuple[Any, ...]:
    choice = p.get("choice", "auto")
    reasons = [f"{choice} by the user"] if choice != "auto" else []
    reasons += [p["note"]] if p.get("note") else []
    reasons += [f"{n}: {why}" for why, n in p.get("skipped", {}).items()]
    return p["name"], p["matched"], p["changed"], "; ".join(reasons)


def _upto(max_tokens: int) -> str:
    return f"<= {max_tokens}" if max_tokens else "any"
