"""``pelton quantize``: a checkpoint into a smaller one that others load too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pelton.errors import ConfigError, MissingDependencyError
from pelton.serving.cli.options import Command, setting_type
from pelton.serving.cli.progress import build_progress, notify
from pelton.serving.cli.tables import show

if TYPE_CHECKING:
    from pelton.models.checkpoint import Checkpoint
    from pelton.quant.config import QuantConfig

#: Fields of a recipe that a flag gives as it is.
_PLAIN = ("weights", "symmetric", "clip", "act_order", "kv", "alpha", "damping")
#: Of its calibration.
_CALIBRATION = ("sequences", "length", "seed")


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton quantize --list
  pelton quantize ./SmolLM2-135M-Instruct --recipe awq-int4 -o ./smollm2-awq
  pelton quantize model.gguf --recipe gptq-int4 --weights int4_g64 --calibration prose.txt -o ./small
  pelton quantize ./model --recipe int4 --override "*.down_proj=int8_row" --ignore "*.layers.0.*" -o ./small
  pelton quantize ./model --sweep --recipe int4,gptq-int4,awq-int4 -o ./sweep
  pelton build ./smollm2-awq -o smollm2.engine
  pelton build ./model --quant gptq-int4          without the checkpoint in between

The linear layers of the decoder layers are quantised, the head and embeddings where --override names them.
Layers that are done are kept in OUTPUT.partial: the same command goes on there if it was stopped.""",
)
@click.argument("checkpoint", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--recipe", "name", metavar="NAME", help="What to do: see --list.")
@click.option("--list", "as_list", is_flag=True, help="Show the recipes and leave.")
@click.option("--sweep", is_flag=True, help="Measure recipes (--recipe a,b,c) side by side instead.")
@click.option("--speed", is_flag=True, help="With --sweep: time decode steps of an engine of each too.")
@click.option("--format", "fmt", metavar="NAME", help="compressed-tensors, gptq or bitsandbytes.")
@click.option("--weights", metavar="TYPE", help="Another type than the recipe's: int4_g64, int8_row, ...")
@click.option("--symmetric/--asymmetric", default=None, help="Zero in the middle of each group's codes.")
@click.option("--clip/--no-clip", default=None, help="Search smaller ranges of groups (AWQ's).")
@click.option("--act-order/--no-act-order", default=None, help="GPTQ: large activations' columns first.")
@click.option("--kv", type=click.Choice(["int8", "fp8"]), help="Type of KV caches, with measured scales.")
@click.option("--damping", type=float, metavar="X", help="GPTQ: added to the Hessian's diagonal (0.01).")
@click.option("--alpha", type=float, metavar="X", help="Scaling's exponent instead of a search.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Modules to leave as they are (repeatable).")
@click.option(
    "--override",
    "overrides",
    multiple=True,
    type=setting_type("PATTERN=TYPE, such as *.down_proj=int8_row"),
    metavar="PATTERN=TYPE",
    help="Another type, or none, for some modules (repeatable; the first that fits counts).",
)
@click.option("--calibration", type=click.Path(path_type=Path), help="Text to calibrate on.")
@click.option("--sequences", type=int, metavar="N", help="Pieces of it to read (32).")
@click.option("--length", type=int, metavar="N", help="Tokens of a piece (512).")
@click.option("--seed", type=int, metavar="N", help="Which pieces (0).")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def quantize(
    checkpoint: str | None,
    output: Path | None,
    name: str | None,
    as_list: bool,
    sweep: bool,
    speed: bool,
    fmt: str | None,
    quiet: bool,
    **given: Any,
) -> None:
    """Quantise CHECKPOINT (a Hugging Face folder, GGUF file or hub id) into the folder OUTPUT."""
    if as_list:
        _list()
        return
    if speed and not sweep:
        raise click.UsageError("--speed is of --sweep")
    if sweep:
        from pelton.serving.cli.sweep import USUAL, run_sweep

        if checkpoint is None or fmt is not None:
            raise click.UsageError("CHECKPOINT is missing" if fmt is None else "--sweep writes no checkpoint")
        names = USUAL if name is None else name.split(",")
        configs = [_config(one, given, sweep=True) for one in names]
        _all_idle(configs, given)
        run_sweep(_open(checkpoint), configs, output or Path("sweep"), speed=speed, quiet=quiet)
        return
    for value, what in ((checkpoint, "CHECKPOINT"), (output, "-o OUTPUT"), (name, "--recipe NAME")):
        if value is None:
            raise click.UsageError(f"{what} is missing")
    assert checkpoint and output and name
    config = _config(name, given)
    try:
        from pelton.builder.write_quantized import format_for
        from pelton.builder.write_quantized import quantize as write
    except ImportError as error:
        raise MissingDependencyError(
            f"quantising needs {error.name or 'torch'}: pip install 'pelton[build]'"
        ) from error
    fmt = format_for(config, fmt)
    opened = _open(checkpoint)
    with build_progress(quiet) as progress:
        report = write(opened, config, output, fmt=fmt, progress=progress)
    if not quiet:
        click.echo(report.text())
        click.echo(f"  {output.name}  {report.summary()}, {fmt}")


def _open(checkpoint: str) -> Checkpoint:
    from pelton.models.checkpoint import open_checkpoint
    from pelton.serving.engine_cache import classify, download, local_path

    kind = classify(checkpoint)
    if kind == "engine":
        raise ConfigError(f"{checkpoint} is an engine; quantise the checkpoint that it was built from")
    return open_checkpoint(download(checkpoint, notify) if kind == "hub" else local_path(checkpoint))


def _config(name: str, given: dict[str, Any], *, sweep: bool = False) -> QuantConfig:
    """The recipe with what flags change in it; in a sweep those flags that it has a use for."""
    import msgspec

    from pelton.quant.config import idle
    from pelton.quant.recipes import recipe, with_fields

    config = recipe(name)
    fields = {field: given[field] for field in _PLAIN if given[field] is not None}
    if given["ignore"]:
        fields["ignore"] = given["ignore"]
    if given["overrides"]:
        fields["overrides"] = dict(given["overrides"])
        if len(fields["overrides"]) < len(given["overrides"]):
            raise ConfigError("a pattern is given twice to --override; leave one out")
    calibration = {field: given[field] for field in _CALIBRATION}
    calibration["text"] = None if given["calibration"] is None else str(given["calibration"])
    changed = {field: value for field, value in calibration.items() if value is not None}
    if changed:
        fields["calibration"] = msgspec.structs.replace(config.calibration, **changed)
    unused = idle(msgspec.structs.replace(config, **fields))
    for field in [field for field in unused if field in fields]:
        if sweep:
            del fields[field]
        elif field == "calibration":
            raise ConfigError(f"the recipe {name} sees no text; leave {', '.join(changed)} out")
        else:
            raise ConfigError(f"{field} is for {unused[field]}, not for the recipe {name}; leave it out")
    return with_fields(config, **fields)


def _all_idle(configs: list[QuantConfig], given: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for a flag that none of the recipes of a sweep has a use for."""
    from pelton.quant.config import idle

    flags = {field: field for field in _PLAIN} | dict.fromkeys((*_CALIBRATION, "calibration"), "calibration")
    for flag, field in flags.items():
        if given[flag] is not None and all(field in idle(config) for config in configs):
            raise ConfigError(
                f"{flag} is for {idle(configs[0])[field]}, and none of these is such; leave it out"
            )


def _list() -> None:
    from pelton.quant.config import describe, weight_bits
    from pelton.quant.recipes import RECIPES

    rows = [
        (name, describe(config), f"{weight_bits(config.weights):.2f}", "text" if config.calibrated else "")
        for name, config in RECIPES.items()
    ]
    show("", rows, header=("recipe", "what it does", "bits a weight", "calibration"))
