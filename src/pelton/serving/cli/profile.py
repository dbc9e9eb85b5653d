"""``pelton profile``: where an engine's time goes, beside what the machine can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pelton.errors import ConfigError
from pelton.serving.cli.options import Command, trust_option
from pelton.serving.cli.progress import notify

if TYPE_CHECKING:
    from pelton.engine.artifact import Engine
    from pelton.engine.cost import Cost
    from pelton.engine.plan import Plan
    from pelton.engine.profile import PhaseProfile, Tokens

#: Tokens to prefill unless said otherwise, where the engine takes as many.
PROMPT_LEN = 256


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton profile model.engine
  pelton profile model.engine --batch-size 8 --prompt-len 512 --steps 32 --threads 2
  pelton profile model.engine --prompt "Why is the sky blue?" --trace trace.json   open in ui.perfetto.dev
  pelton profile model.engine --json | jq .phases

Bytes and operations are computed from the plan: each weight and each visible key and value once, a
multiply-add as two. The machine's read bandwidth and arithmetic rates are measured too, in half a second;
"% read" and "% rate" say how much of them an op uses. Times of instructions include a barrier. On a GPU the
step is the graph's or the launches' whole, and instructions are timed apart by the GPU itself.""",
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to prefill. Default: --prompt-len tokens of random ids.")
@click.option(
    "--prompt-len", type=click.IntRange(1), help=f"Tokens to prefill. Default: {PROMPT_LEN}, or what fits."
)
@click.option("--batch-size", default=1, show_default=True, type=click.IntRange(1), help="Sequences.")
@click.option("--steps", default=16, show_default=True, type=click.IntRange(1), help="Tokens to decode.")
@click.option("--threads", type=int, metavar="N", help="CPU threads; 0: all cores. Default: as built.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome/Perfetto trace here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@trust_option
def profile(
    engine: Path,
    prompt: str | None,
    prompt_len: int | None,
    batch_size: int,
    steps: int,
    threads: int | None,
    trace: Path | None,
    as_json: bool,
    trust: bool,
) -> None:
    """Time ENGINE by op and by layer, for prefill and decode, and compare it with the machine."""
    from pelton.engine.artifact import open_engine
    from pelton.engine.profile import blocks_needed, phases, profile_session
    from pelton.engine.session import Session

    opened = open_engine(engine)
    if opened.on_gpu and threads is not None:
        raise ConfigError(f"--threads is for engines for CPUs, and {engine} is for a GPU; leave it out")
    fitting = (opened.config.build.max_seq_len or PROMPT_LEN) - steps
    prompts = _prompts(opened, prompt, prompt_len or max(1, min(PROMPT_LEN, fitting)), batch_size)
    blocks = blocks_needed(opened.config, prompts, steps)
    with Session(opened, threads=threads, kv_blocks=blocks, trust=trust) as session:
        measured = profile_session(session, prompts, steps)
        used = session.threads
    ceilings = _gpu_ceilings(opened) if opened.on_gpu else _cpu_ceilings(used)
    found = phases(measured)
    if trace is not None:
        _write_trace(trace, opened, measured)
    record = _record(opened, found, ceilings)
    if as_json:
        import msgspec

        shown = {key: value for key, value in record.items() if key != "words"}
        click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
    else:
        _print(record)


def _prompts(engine: Engine, text: str | None, length: int, batch: int) -> list[Tokens]:
    import numpy as np

    vocabulary = engine.config.model.vocab_size
    if text is None:
        rng = np.random.default_rng(0)
        return [rng.integers(0, vocabulary, length, dtype=np.int32) for _ in range(batch)]
    from pelton.runtime.tokenizer import Tokenizer

    ids = np.array(Tokenizer.from_dir(engine.tokenizer_path).encode(text), np.int32)
    if not ids.size:
        raise ConfigError("the prompt is empty; give some text, or --prompt-len")
    return [ids] * batch


def _write_trace(path: Path, engine: Engine, steps: list[Any]) -> None:
    import msgspec

    from pelton.engine.profile_trace import chrome_trace

    title = f"pelton {engine.config.model.name}"
    path.write_bytes(msgspec.json.encode(chrome_trace(engine.plan, steps, title)))
    notify(f"trace of {len(steps)} steps in {path}; open it at ui.perfetto.dev or chrome://tracing")


@dataclass(frozen=True)
class _Ceilings:
    """What the machine can do, a second."""

    machine: dict[str, Any]
    """For the JSON object."""
    words: str
    read: float
    """Bytes."""
    rate: float
    """Operations of the engine's own products."""
    int8: float


def _cpu_ceilings(threads: int) -> _Ceilings:
    from pelton.kernels.roofline import measure

    rates = measure(threads)
    machine = {
        "threads": rates.threads,
        "read_bytes_per_second": rates.read,
        "float32_operations_per_second": rates.float32,
        "int8_operations_per_second": rates.int8,
    }
    words = (
        f"{rates.threads} threads. The machine reads {rates.read / 1e9:.1f} GB/s and does "
        f"{rates.float32 / 1e9:.0f} float32, {rates.int8 / 1e9:.0f} int8 G operations/s."
    )
    return _Ceilings(machine, words, rates.read, rates.float32, rates.int8)


def _gpu_ceilings(engine: Engine) -> _Ceilings:
    from pelton.kernels.gpu.roofline import measure

    rates = measure(str(engine.config.build.dtype))
    machine = {
        "gpu": rates.name,
        "read_bytes_per_second": rates.memory,
        "dtype": rates.dtype,
        "matrix_operations_per_second": rates.matrix,
    }
    words = (
        f"{rates.name}. It moves {rates.memory / 1e9:.0f} GB/s and does {rates.matrix / 1e12:.0f} T "
        f"{rates.dtype} operations/s."
    )
    return _Ceilings(machine, words, rates.memory, rates.matrix, rates.matrix)


def _record(engine: Engine, found: list[PhaseProfile], ceilings: _Ceilings) -> dict[str, Any]:
    """Everything as one JSON object."""
    return {
        "engine": str(engine.path),
        "model": engine.config.model.name,
        "machine": ceilings.machine,
        "words": ceilings.words,
        "phases": [_phase(engine.plan, phase, ceilings) for phase in found],
    }


def _phase(plan: Plan, phase: PhaseProfile, ceilings: _Ceilings) -> dict[str, Any]:
    from pelton.engine.cost import runs_int8
    from pelton.engine.layers import instruction_layers
    from pelton.engine.profile_trace import tactics_of

    tokens = min(phase.tokens, plan.dims["T"])
    tactics = tactics_of(plan, tokens, phase.logits)
    int8 = [runs_int8(plan, i, tactic) for i, tactic in zip(plan.instructions, tactics, strict=True)]
    total = float(phase.seconds.sum())
    ops: dict[tuple[str, str], list[int]] = {}
    by_layer: dict[int | None, list[int]] = {}
    for i, layer in enumerate(instruction_layers(plan)):
        ops.setdefault((plan.instructions[i].op, tactics[i]), []).append(i)
        by_layer.setdefault(layer, []).append(i)

    def row(members: list[int], bytes_wide: bool = False) -> dict[str, Any]:
        from pelton.engine.cost import Cost

        seconds = float(phase.seconds[members].sum())
        cost: Cost = sum((phase.costs[i] for i in members), Cost())
        rate = ceilings.int8 if bytes_wide else ceilings.rate
        return {
            "instructions": len(members),
            "ms": seconds * 1e3,
            "share": seconds / total if total else 0.0,
            **_per_second(cost, seconds, ceilings.read, rate),
        }

    return {
        "phase": phase.phase,
        "steps": phase.steps,
        "tokens": phase.tokens,
        "ms": phase.plain * 1e3,
        "ms_profiled": phase.wall * 1e3,
        "ms_instructions": total * 1e3,
        "ms_host": phase.host * 1e3,
        "total": row(list(range(len(plan.instructions))), any(int8)),
        "ops": [
            {"op": op, "tactic": tactic, **row(members, int8[members[0]])}
            for (op, tactic), members in sorted(ops.items(), key=lambda e: -phase.seconds[e[1]].sum())
        ],
        "layers": [{"layer": layer, **row(members)} for layer, members in by_layer.items()],
        "instructions": [
            {"name": i.name, "op": i.op, "tactic": tactics[n], **row([n], int8[n])}
            for n, i in enumerate(plan.instructions)
        ],
    }


def _per_second(cost: Cost, seconds: float, read: float, rate: float) -> dict[str, Any]:
    seconds = max(seconds, 1e-12)
    return {
        "weight_bytes": cost.weights,
        "kv_bytes": cost.kv,
        "activation_bytes": cost.activations,
        "operations": cost.operations,
        "bytes_per_second": cost.memory / seconds,
        "of_read_bandwidth": cost.memory / seconds / read,
        "operations_per_second": cost.operations / seconds,
        "of_rate": cost.operations / seconds / rate,
    }


def _print(record: dict[str, Any]) -> None:
    from pelton.serving.cli.tables import table

    click.echo(f"{record['model']}, {record['words']}")
    for phase in record["phases"]:
        what = (
            f"prefill of {phase['tokens']} tokens in {phase['steps']} steps"
            if phase["phase"] == "prefill"
            else f"decode, {phase['tokens']} sequences, median of {phase['steps']} steps"
        )
        header = ("op", "tactic", "calls", "ms", "share", "MB", "GB/s", "% read", "Gop/s", "% rate")
        rows = [(op["op"], op["tactic"], *_cells(op)) for op in phase["ops"]]
        rows.append(("all", "", *_cells(phase["total"])))
        click.echo(
            f"\n{what}: {phase['ms']:.2f} ms ({phase['ms_profiled']:.2f} profiled: "
            f"instructions {phase['ms_instructions']:.2f}, host {phase['ms_host']:.2f})"
        )
        click.echo(table("", rows, header=header))
    click.echo("\nby layer, ms (share)")
    click.echo(
        table("", _layer_rows(record["phases"]), header=("layer", *(p["phase"] for p in record["phases"])))
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    memory = row["weight_bytes"] + row["kv_bytes"]
    return (
        str(row["instructions"]),
        f"{row['ms']:.3f}",
        f"{row['share']:.1%}",
        f"{memory / 1e6:.2f}" if memory else "",
        f"{row['bytes_per_second'] / 1e9:.1f}" if memory else "",
        f"{row['of_read_bandwidth']:.0%}" if memory else "",
        f"{row['operations_per_second'] / 1e9:.1f}" if row["operations"] else "",
        f"{row['of_rate']:.0%}" if row["operations"] else "",
    )


def _layer_rows(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    names = [row["layer"] for row in found[0]["layers"]]
    cells = [[f"{row['ms']:.3f} ({row['share']:.1%})" for row in phase["layers"]] for phase in found]
    return [
        ("outside" if name is None else str(name), *(column[i] for column in cells))
        for i, name in enumerate(names)
    ]
