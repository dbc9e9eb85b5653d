"""``pelton inspect``: what is in an engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from pelton.serving.cli.options import Command
from pelton.serving.cli.tables import table


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton inspect model.engine
  pelton inspect model.engine --plan           every instruction
  pelton inspect model.engine --verify         read all files, compare their SHA-256
  pelton inspect model.engine --json | jq .memory""",
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--plan", "show_plan", is_flag=True, help="List every instruction with its tactics.")
@click.option("--verify", is_flag=True, help="Read all files and compare their SHA-256.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(engine: Path, show_plan: bool, verify: bool, as_json: bool) -> None:
    """Show what ENGINE is, was built for and needs: model, limits, memory, tactics, build report."""
    from pelton.engine.artifact import open_engine

    opened = open_engine(engine, verify=verify)
    if as_json:
        record = _record(opened, show_plan)
        click.echo(msgspec.json.format(msgspec.json.encode(record)).decode())
    else:
        _print(opened, show_plan, verify)


def _record(engine: Any, show_plan: bool) -> dict[str, Any]:
    record = {
        "path": str(engine.path),
        "engine_id": engine.engine_id,
        "nbytes": engine.nbytes,
        "manifest": msgspec.to_builtins(engine.manifest),
        **msgspec.to_builtins(engine.config),
        "instructions": len(engine.plan.instructions),
        "tactics": _tactics(engine.plan),
        "report": engine.report(),
    }
    if show_plan:
        record["plan"] = msgspec.to_builtins(engine.plan)
    return record


def _tactics(plan: Any) -> list[dict[str, Any]]:
    """How often each tactic of each op stands in the plan, and up to how many tokens."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for instruction in plan.instructions:
        for choice in instruction.tactics:
            counts[instruction.op, choice.tactic, choice.max_tokens] += 1
        if not instruction.tactics:
            counts[instruction.op, "reference", 0] += 1
    return [
        {"op": op, "tactic": tactic, "max_tokens": max_tokens, "instructions": n}
        for (op, tactic, max_tokens), n in sorted(counts.items())
    ]


def _print(engine: Any, show_plan: bool, verified: bool) -> None:
    from pelton.engine.resources import human_bytes

    model, build, memory = engine.config.model, engine.config.build, engine.config.memory
    state = ", every file verified" if verified else ""
    click.echo(f"{engine.path}  {human_bytes(engine.nbytes)}{state}\n")
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
    fields = msgspec.to_builtins(build)
    click.echo("\n" + table("built for", [(name, _setting(name, value)) for name, value in fields.items()]))
    click.echo(
        "\n"
        + table(
            "memory",
            [
                ("weights", human_bytes(memory.weights)),
                ("arena", human_bytes(memory.arena)),
                ("workspace", human_bytes(memory.workspace)),
                ("inputs", human_bytes(memory.inputs)),
                ("KV per token", human_bytes(memory.kv_bytes_per_token)),
                (
                    "KV at the limits",
                    human_bytes(memory.kv_bytes_per_token * build.max_batch_size * build.max_seq_len),
                ),
            ],
        )
    )
    click.echo(f"\nplan: {len(engine.plan.instructions)} instructions")
    rows = [(t["op"], t["tactic"], _upto(t["max_tokens"]), t["instructions"]) for t in _tactics(engine.plan)]
    click.echo(table("", rows, header=("op", "tactic", "tokens", "instructions")))
    if show_plan:
        click.echo()
        for i, instruction in enumerate(engine.plan.instructions):
            names = [engine.plan.operands[o].name if o >= 0 else "-" for o in instruction.inputs]
            outs = [engine.plan.operands[o].name for o in instruction.outputs]
            click.echo(f"{i:4} {', '.join(outs)} = {instruction.op}({', '.join(names)})")
    click.echo("\nbuild report")
    click.echo(_report(engine.report()))
    made = engine.manifest
    click.echo(f"\nmade by Pelton {made.pelton_version}, format {made.format_version}, for {made.target}")


def _setting(name: str, value: Any) -> str:
    return "all cores" if name == "threads" and value == 0 else str(value)


def _upto(max_tokens: int) -> str:
    return f"<= {max_tokens}" if max_tokens else "any"


def _report(value: Any, indent: int = 1) -> str:
    """A nested report as indented lines; long lists by their length."""
    lines = []
    pad = "  " * indent
    for name, item in value.items():
        if isinstance(item, dict):
            lines.append(f"{pad}{name}\n{_report(item, indent + 1)}" if item else f"{pad}{name}: none")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            lines.append(f"{pad}{name}: {len(item)} (see --json)")
        elif isinstance(item, list):
            lines += [
                f"{pad}{name}:" + ("" if item else " none"),
                *(f"{pad}  {entry}" for entry in item[:40]),
            ]
        else:
            lines.append(f"{pad}{name}: {item}")
    return "\n".join(lines)
