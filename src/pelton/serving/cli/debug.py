"""``pelton debug``: look at an engine's tensors, and find the op where it parts from another run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pelton.errors import ConfigError
from pelton.serving.cli.options import Command, trust_option
from pelton.serving.cli.progress import notify
from pelton.serving.cli.tables import table

if TYPE_CHECKING:
    from pelton.engine.artifact import Engine
    from pelton.engine.batch import InputBatch
    from pelton.engine.debug import Comparison, Probe

PROMPT = "The sky is blue because light of short waves is scattered more than light of long ones."


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton debug model.engine --list
  pelton debug model.engine --tensor model.layers.3.mlp.down_proj.linear --prompt "Hello" --save hello.npz
  pelton debug model.engine --against reference --prompt "Why is the sky blue?"
  pelton debug model.engine --against other.engine
  pelton debug model.engine --against ./checkpoint

OTHER is the word reference (each op's definition in PyTorch, float32, on the same weights), another engine
of the same model, or a checkpoint (its own model, eager, float32). Both sides compute the same prompt and
some tokens after it; an instruction departs when it adds more error than its precision explains.
Exit code 1: some instruction departs.""",
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--list", "list_tensors", is_flag=True, help="List every tensor that can be looked at.")
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Show this tensor (repeatable).")
@click.option("--save", type=click.Path(path_type=Path), help="Write the tensors shown to this .npz file.")
@click.option("--against", metavar="OTHER", help="Compare with: reference, an engine, a checkpoint.")
@click.option("--prompt", default=PROMPT, help="Text to compute. Default: a sentence.")
@click.option(
    "--steps", default=3, show_default=True, type=click.IntRange(0), help="Tokens to decode after it."
)
@click.option("--all", "show_all", is_flag=True, help="Print every tensor compared, not one a layer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@trust_option
def debug(
    engine: Path,
    list_tensors: bool,
    tensors: tuple[str, ...],
    save: Path | None,
    against: str | None,
    prompt: str,
    steps: int,
    show_all: bool,
    as_json: bool,
    trust: bool,
) -> None:
    """Look into ENGINE while it runs, without a rebuild."""
    from pelton.engine.artifact import open_engine

    opened = open_engine(engine)
    if sum((list_tensors, bool(tensors), against is not None)) != 1:
        raise ConfigError("say what to do, one of: --list, --tensor NAME, --against OTHER")
    if save is not None and not tensors:
        raise ConfigError("--save keeps the tensors of --tensor; name one")
    if list_tensors:
        _list(opened, as_json)
    elif tensors:
        _show(opened, tensors, _prompt_tokens(opened, prompt), save, as_json, trust)
    else:
        assert against is not None
        _against(opened, against, _prompt_tokens(opened, prompt), steps, show_all, as_json, trust)


def _list(engine: Engine, as_json: bool) -> None:
    from pelton.engine.plan import producers

    plan = engine.plan
    made_by = producers(plan)
    made = [(o, made_by[o.buffer]) for o in plan.operands if o.buffer in made_by]
    made.sort(key=lambda entry: entry[1])
    rows = [
        {
            "name": operand.name,
            "dtype": plan.buffers[operand.buffer].dtype,
            "shape": list(operand.shape),
            "op": plan.instructions[index].op,
            "instruction": index,
        }
        for operand, index in made
    ]
    if as_json:
        _echo_json(rows)
    else:
        shown = [(r["name"], f"{r['dtype']}{r['shape']}", f"{r['instruction']} {r['op']}") for r in rows]
        click.echo(table("", shown, header=("tensor", "type", "made by")))


def _prompt_tokens(engine: Engine, prompt: str) -> list[int]:
    from pelton.runtime.tokenizer import Tokenizer

    ids = Tokenizer.from_dir(engine.tokenizer_path).encode(prompt)
    plan, build = engine.plan, engine.config.build
    longest = min(plan.dims["T"], plan.dims["N"], build.max_input_len or 1)
    if not ids:
        raise ConfigError("the prompt is empty; give some text")
    if len(ids) > longest:
        notify(f"the prompt's {len(ids)} tokens are cut to {longest}, so that one step computes them all.")
    return list(ids[:longest])


def _show(
    engine: Engine,
    names: tuple[str, ...],
    tokens: list[int],
    save: Path | None,
    as_json: bool,
    trust: bool,
) -> None:
    import numpy as np

    from pelton.engine.debug import as_values
    from pelton.engine.session import Session

    known = {o.name for o in engine.plan.operands}
    for name in names:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --list"
            raise ConfigError(f"the engine has no tensor {name!r}; {hint}")
    (batch,) = _batches(engine, tokens, [])
    with Session(engine, kv_blocks=_blocks(engine, len(tokens)), trust=trust) as session:
        found = {n: as_values(a) for n, a in session.run(batch, names).outputs.items()}
    if save is not None:
        np.savez(save, **found)  # type: ignore[arg-type]
        notify(f"{len(found)} tensors in {save}")
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "shape": list(a.shape),
            "min": float(a.min()),
            "max": float(a.max()),
            "mean": float(a.mean()),
            "rms": float(np.sqrt(np.mean(a.astype(np.float64) ** 2))),
            "not_finite": int((~np.isfinite(a)).sum()),
            "first": [float(v) for v in a.reshape(-1)[:6]],
        }
        for name, a in found.items()
    ]
    if as_json:
        _echo_json(rows)
        return
    for row in rows:
        click.echo(f"{row['name']}  {row['shape']}")
        click.echo(
            f"  min {row['min']:.6g}  max {row['max']:.6g}  mean {row['mean']:.6g}  rms {row['rms']:.6g}"
            f"  not finite {row['not_finite']}"
        )
        click.echo("  " + " ".join(f"{v:.6g}" for v in row["first"]) + " ...")


def _blocks(engine: Engine, tokens: int) -> int:
    size = engine.config.build.block_size
    assert size is not None
    return -(-tokens // size)


def _batches(engine: Engine, tokens: list[int], more: list[int]) -> list[InputBatch]:
    """The prompt as one step with logits of every row, then each of ``more`` as a step."""
    import numpy as np

    from pelton.engine.pieces import Piece, make_batch

    blocks = np.arange(_blocks(engine, len(tokens) + len(more)), dtype=np.int32)
    parts: list[tuple[list[int], int]] = [(tokens, 0)]
    parts += [([token], len(tokens) + i) for i, token in enumerate(more)]
    return [
        make_batch([Piece(tokens=np.array(t, np.int32), start=start, blocks=blocks)], engine.config)
        for t, start in parts
    ]


def _against(
    engine: Engine, other: str, tokens: list[int], steps: int, show_all: bool, as_json: bool, trust: bool
) -> None:
    from pelton.engine.debug import OwnErrors, SessionProbe, compare
    from pelton.engine.session import Session

    steps = min(steps, (engine.config.build.max_seq_len or 1) - len(tokens))
    blocks = _blocks(engine, len(tokens) + steps)
    more = _continuation(engine, tokens, steps, blocks, trust)
    session = Session(engine, kv_blocks=blocks, trust=trust)
    left = SessionProbe(session, f"{engine.path.name} ({session.runner_name})")
    try:
        right = _other(engine, other, blocks, trust)
        own = OwnErrors(session, session.num_blocks) if other == "reference" else None
        try:
            found = compare(engine.plan, left, right, _batches(engine, tokens, more), own)
        finally:
            right.close()
    finally:
        left.close()
    if as_json:
        _echo_json(_record(engine, left, right, found))
    else:
        _print(engine, left, right, found, len(tokens), show_all)
    if found.first is not None:
        raise click.exceptions.Exit(1)


def _continuation(engine: Engine, tokens: list[int], steps: int, blocks: int, trust: bool) -> list[int]:
    """The likeliest tokens after ``tokens`` as the engine has it: both sides compute these."""
    from pelton.engine.session import Session

    more: list[int] = []
    with Session(engine, kv_blocks=blocks, trust=trust) as session:
        while len(more) < steps:
            # The last step alone: the cache holds what came before.
            batch = _batches(engine, tokens, more)[-1]
            more.append(int(session.run(batch).logits_NV[-1].argmax()))
    return more


def _other(engine: Engine, other: str, blocks: int, trust: bool) -> Probe:
    from pelton.engine.artifact import is_engine, open_engine
    from pelton.engine.debug import SessionProbe
    from pelton.engine.session import Session

    if other == "reference":
        session = Session(engine, kv_blocks=blocks, runner="reference", trust=trust)
        return SessionProbe(session, "the reference")
    if is_engine(other):
        second = open_engine(other)
        _check_same_model(engine, second)
        return SessionProbe(Session(second, kv_blocks=blocks, trust=trust), second.path.name)
    from pelton.errors import MissingDependencyError
    from pelton.serving.engine_cache import classify, download, local_path

    kind = classify(other)
    folder = download(other, notify) if kind == "hub" else local_path(other)
    try:
        from pelton.builder.eager_probe import EagerProbe
        from pelton.models.checkpoint import open_checkpoint
    except ImportError as error:
        raise MissingDependencyError(
            f"running a checkpoint's own model needs PyTorch ({error}); pip install 'pelton[build]'"
        ) from error
    return EagerProbe(open_checkpoint(folder), engine.config, engine.plan, blocks)


def _check_same_model(a: Engine, b: Engine) -> None:
    for field in ("architecture", "num_layers", "hidden_size", "vocab_size", "kv_groups"):
        mine, theirs = getattr(a.config.model, field), getattr(b.config.model, field)
        if mine != theirs:
            raise ConfigError(
                f"{a.path.name} and {b.path.name} are of different models: {field} "
                f"{mine} and {theirs}; compare engines of one model"
            )
    for field in ("block_size", "max_seq_len"):
        mine, theirs = getattr(a.config.build, field), getattr(b.config.build, field)
        if mine != theirs:
            raise ConfigError(
                f"{a.path.name} has {field} {mine} and {b.path.name} {theirs}, so they take different "
                "batches; build both with the same"
            )


def _row(engine: Engine, e: Any) -> dict[str, Any]:
    from pelton.engine.profile_trace import tactic_of

    instruction = engine.plan.instructions[e.instruction]
    return {
        "step": e.step,
        "instruction": e.instruction,
        "tensor": e.name,
        "op": instruction.op,
        "tactic": tactic_of(instruction, 1),
        "error": e.error,
        "inherited": e.inherited,
        "own": e.own,
        "bound": e.bound,
        "departs": e.departs,
    }


def _record(engine: Engine, left: Probe, right: Probe, found: Comparison) -> dict[str, Any]:
    first = found.first
    return {
        "engine": left.name,
        "against": right.name,
        "tokens": found.tokens,
        "compared": len(found.errors),
        "without_counterpart": found.missing,
        "only_in_other": found.extra,
        "first": _row(engine, first) if first else None,
        "tensors": [_row(engine, e) for e in found.errors],
    }


def _print(engine: Engine, left: Probe, right: Probe, found: Comparison, prompt: int, show_all: bool) -> None:
    from pelton.engine.debug import layer_table

    click.echo(
        f"{left.name} against {right.name}: {prompt} tokens, then {len(found.tokens) - prompt} one by one; "
        f"{len(found.errors)} tensors compared, {len(found.missing)} of each step without a counterpart.\n"
    )
    header = ("step", "tensor", "error", "of inputs", "alone", "bound")
    if show_all:
        click.echo(table("", [_cells(e) for e in found.errors], header=header))
    else:
        click.echo("largest error of each layer")
        rows = [
            ("outside" if layer is None else str(layer), *_cells(e)[:-2], "" if own is None else f"{own:.2e}")
            for layer, e, own in layer_table(engine.plan, found)
        ]
        click.echo(table("", rows, header=("layer", *header[:-2], "largest alone")))
    first = found.first
    if first is None:
        click.echo("\nNo instruction departs beyond its bound.")
        return
    row = _row(engine, first)
    where = "prefill" if first.step == 0 else f"decode step {first.step}"
    how = (
        f"its own error is {first.own:.3g}, its bound {first.bound:g}"
        if first.own is not None
        else f"its error is {first.error:.3g}, its inputs' {first.inherited:.3g}, its bound {first.bound:g}"
    )
    click.echo(
        f"\nFirst to depart: {first.name}\n"
        f"  instruction {first.instruction}, {row['op']} by {row['tactic']}, {where}: {how}."
    )


def _cells(e: Any) -> tuple[str, ...]:
    return (
        str(e.step),
        e.name,
        f"{e.error:.2e}",
        f"{e.inherited:.2e}",
        "" if e.own is None else f"{e.own:.2e}",
        f"{e.bound:g}",
    )


def _echo_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())
