"""A build's checkpoint, quantised first where ``BuildConfig.quant`` names a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pelton.builder.clock import Progress
from pelton.builder.quantize import quantize
from pelton.builder.quantize_prepare import prepare
from pelton.builder.quantized_view import planned, round_in_stream
from pelton.engine.temporary import folder_beside
from pelton.models.checkpoint import Checkpoint
from pelton.quant.recipes import recipe

#: No recipe.
NONE = "none"


def kv_dtype_of(name: str | None) -> str | None:
    """Type of KV caches that the recipe ``name`` asks for, if any."""
    return None if name is None or name == NONE else recipe(name).kv


def before_calibrating(checkpoint: Checkpoint, name: str | None) -> Checkpoint | None:
    """``checkpoint`` with the types of a recipe that runs on text first, and no values; None: it does not.

    Raises what of that is refused without reading a weight.
    """
    if name is None or name == NONE or not (config := recipe(name)).calibrated:
        return None
    prepare(checkpoint, config)
    return planned(checkpoint, config)


@contextmanager
def quantized_input(
    checkpoint: Checkpoint, name: str | None, output: Path, progress: Progress, *, dry_run: bool = False
) -> Iterator[Checkpoint]:
    """``checkpoint`` as the recipe ``name`` makes it, within the block.

    Recipes without calibration round weights as they are read; the others run first, layer by layer, and keep
    what they make in a temporary folder beside ``output``. A dry run only knows the types.
    """
    if name is None or name == NONE:
        yield checkpoint
        return
    config = recipe(name)
    config.check()
    if dry_run:
        yield planned(checkpoint, config)
    elif not config.calibrated:
        yield round_in_stream(checkpoint, config)
    else:
        with folder_beside(output, "quantising") as folder:
            yield quantize(checkpoint, config, folder / "layers", progress=progress)[0]
