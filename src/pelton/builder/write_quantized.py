"""A checkpoint quantised into a folder that others load: layer by layer, resumable, whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from pelton import nn
from pelton.builder.clock import Progress
from pelton.builder.evaluation import WINDOW, eager_config
from pelton.builder.kv_calibration import see
from pelton.builder.quantize import quantize as quantize_layers
from pelton.builder.quantize_report import QuantizeReport
from pelton.builder.quantize_state import alone_in
from pelton.builder.quantized_view import QuantizedCheckpoint, draft, places, planned
from pelton.dtypes import GGUF_BLOCK_TYPES
from pelton.errors import ConfigError
from pelton.ir.kv_quant import CACHE_DTYPE
from pelton.models.checkpoint import Checkpoint, open_checkpoint
from pelton.models.checkpoint.write import FORMATS, check_weights, write_checkpoint
from pelton.quant.config import NONE, QuantConfig
from pelton.quant.recipes import recipe

#: Whether a format stores a type.
_STORES: dict[str, Callable[[str], bool]] = {
    "compressed-tensors": lambda quant: quant.startswith(("int", "fp8", "nvfp4", "mxfp4")),
    "gptq": lambda quant: quant.startswith("int"),
    "bitsandbytes": lambda quant: quant in ("nf4_g64", "int8_row"),
}


def stores(fmt: str, quant: str) -> bool:
    """Whether a checkpoint format has weights of type ``quant``."""
    return quant not in GGUF_BLOCK_TYPES and _STORES[fmt](quant)


def format_for(config: QuantConfig, wanted: str | None = None) -> str:
    """The format to write: ``wanted``, or the first that has all of ``config``. Raises ``ConfigError``."""
    if wanted is not None and wanted not in FORMATS:
        raise ConfigError(f"unknown checkpoint format {wanted!r} (known: {', '.join(FORMATS)})")
    able = [name for name in FORMATS if not _lacks(name, config)]
    if wanted is not None:
        if wanted not in able:
            raise ConfigError(
                f"{wanted} checkpoints have no {_lacks(wanted, config)} (formats that do: "
                f"{', '.join(able) or 'none'})"
            )
        return wanted
    if not able:
        lacks = {name: _lacks(name, config) for name in FORMATS}
        each = ", ".join(f"{name} no {what}" for name, what in lacks.items())
        same = len(set(lacks.values())) == 1
        raise ConfigError(
            f"no checkpoint format has {lacks[FORMATS[0]] if same else f'all of that ({each})'}; build an "
            "engine with it: pelton build --quant"
        )
    return able[0]


def _lacks(name: str, config: QuantConfig) -> str:
    """What of ``config`` a format cannot store; empty: nothing."""
    for quant in (config.weights, *config.overrides.values()):
        if quant != NONE and not stores(name, quant):
            return f"{quant} weights"
    if config.kv is not None and name != "compressed-tensors":
        return "types of KV caches"
    a = config.activations
    if a is not None and a.outliers and name != "bitsandbytes":
        return "exact outliers"
    if name == "gptq" and a is not None:
        return "quantised activations"
    if name == "bitsandbytes":
        if config.weights == "nf4_g64" and a is not None:
            return "quantised activations of nf4 weights"
        if config.weights == "int8_row" and (a is None or a.dtype != "int8" or a.per != "token"):
            return "int8 weights without int8 activations per token"
    return ""


def _attentions(model: nn.CausalLM) -> list[str]:
    """Names of what has KV caches. Raises ``ConfigError`` where checkpoints have no scales for them."""
    found = [name for name, module in model.named_modules() if isinstance(module, nn.Attention)]
    if not all(name.endswith(".self_attn") for name in found):
        raise ConfigError(f"checkpoints of {type(model).__name__} have no scales of KV caches; leave kv out")
    return found


def _kv_scales(view: QuantizedCheckpoint, config: QuantConfig) -> dict[str, float]:
    """Scales of each layer's keys and values by the names that checkpoints give them; none without ``kv``."""
    if config.kv is None:
        return {}
    limit = draft(view).max_position_embeddings
    length = min(WINDOW, limit)
    model = draft(view, max_seq_len=length)
    attentions = _attentions(model)
    scales = see(view, model, eager_config(view).build, rounding=False).of_layers(CACHE_DTYPE[config.kv])
    return {
        f"{name}.{kind}_scale": scale
        for name, of_layer in zip(attentions, scales, strict=True)
        for kind, scale in zip("kv", of_layer, strict=True)
    }


def _seen_here_alone(model: nn.CausalLM, changed: Collection[str], fmt: str) -> tuple[str, ...]:
    """Sentences on quantised weights that transformers does not look for in a checkpoint of format ``fmt``,
    as far as that was tried: it makes them at random, with no more than a warning."""
    if fmt != "compressed-tensors":
        return ()
    where = places(model)
    embeddings = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    notes = [
        f"{where[name].tensor} is quantised, and transformers finds no embeddings there; Pelton does"
        for name in where
        if name in embeddings and where[name].tensor in changed
    ]
    if any(p.transposed and p.tensor in changed for p in where.values()):
        notes.append(
            f"transformers finds no quantised layers of {type(model).__name__}, which are Conv1D there, in "
            "compressed-tensors; Pelton does"
        )
    return tuple(notes)


def quantize(
    checkpoint: str | Path | Checkpoint,
    config: QuantConfig | str,
    output: str | Path,
    *,
    fmt: str | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise ``checkpoint`` by ``config`` (or the recipe of that name) into the folder ``output``.

    ``fmt``: compressed-tensors, gptq or bitsandbytes; None: the first that can hold it.

    Finished layers are kept in ``OUTPUT.partial`` until it is written: started again after it was killed,
    it goes on there. Raises ``ConfigError``, ``CheckpointError`` and ``BuildError`` as ``quantize`` does.
    """
    config = recipe(config) if isinstance(config, str) else config
    if not isinstance(config, QuantConfig):
        raise ConfigError(f"what to quantise to is a recipe's name or a QuantConfig, not {config!r}")
    config.check()
    fmt, output = format_for(config, fmt), Path(output)
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"{output} exists; remove it or choose another output")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {output.absolute().parent} to put {output.name} in")
    if config.kv is not None:
        _attentions(draft(opened))
    plan = planned(opened, config)
    check_weights(
        opened,
        (
            (n.removesuffix(".weight"), i.quant, i.shape, plan.activation_quant(n))
            for n, i in plan.changed.items()
        ),
        config,
        fmt,
    )
    partial = output.with_name(output.name + ".partial")
    with alone_in(partial):
        view, report = quantize_layers(opened, config, partial, progress=progress)
        if progress is not None:
            progress("write", 0, 0)
        write_checkpoint(
            output,
            opened,
            ((name, view.read(name)) for name in view.changed),
            config,
            fmt,
            activation_of=view.activation_quant,
            kv_scales=_kv_scales(view, config),
        )
        shutil.rmtree(partial)
    alone = _seen_here_alone(draft(opened), plan.changed, fmt)
    return msgspec.structs.replace(report, notes=(*report.notes, *alone))
