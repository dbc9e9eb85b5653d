"""A ``transformers`` module made from a configuration alone: parameters without values, buffers with.

Refuses, each with a sentence, what the import does not cover before anything is traced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pelton.errors import CheckpointError
from pelton.models.hf_config import INERT
from pelton.models.transformers_import import attention

#: Keys of configurations that mean experts, and what they must be where there are none.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
#: ``layer_types`` that are attention.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})


def load_config(values: Mapping[str, Any]) -> Any:
    """``config.json`` as ``transformers`` understands it.

    Raises ``CheckpointError`` where ``transformers`` is missing or does not know the model.
    """
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"the architecture {_name(values)} is imported through transformers, which is not installed: "
            "pip install 'pelton[import]'"
        ) from None
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        own_code = " (its own code in the checkpoint is never run)" if "auto_map" in values else ""
        raise CheckpointError(
            f"the architecture {_name(values)} is neither in Pelton nor in transformers "
            f"{transformers.__version__}: model_type {kind!r} is unknown{own_code}"
        )
    with _quiet():
        try:
            config = transformers.CONFIG_MAPPING[kind].from_dict(dict(values))
        except Exception as error:
            raise CheckpointError(
                f"transformers refuses config.json of this {_name(values)}: {first_line(error)}"
            ) from error
    config.use_cache = False
    return config


def model_class(config: Any) -> Any:
    """The causal language model of ``config``; raises ``CheckpointError`` on kinds that are not covered."""
    import transformers

    values = config.to_dict()
    name = _name(values)
    if values.get("quantization_config"):
        raise CheckpointError(f"config.json: quantization_config is not implemented for the imported {name}")
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} is an encoder-decoder model, which Pelton does not run yet")
    experts = [k for k in _EXPERTS if isinstance(values.get(k), int) and values[k] > 1]
    if experts:
        raise CheckpointError(
            f"{name} is a mixture of experts ({experts[0]}={values[experts[0]]}), "
            "which Pelton does not run yet"
        )
    others = sorted(set(values.get("layer_types") or ()) - _ATTENTION_LAYERS)
    if others:
        raise CheckpointError(
            f"{name} has layers other than attention ({', '.join(others)}), which Pelton does not run yet"
        )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{name} is not a causal language model in transformers {transformers.__version__}"
        )
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if name != found.__name__:
        raise CheckpointError(
            f"config.json names the architecture {name}, but its model_type {values['model_type']!r} is "
            f"{found.__name__} in transformers"
        )
    if getattr(found, "_is_stateful", False):
        raise CheckpointError(f"{name} keeps a recurrent state, which Pelton does not run yet")
    if values.get("alibi") or (values.get("attn_config") or {}).get("alibi"):
        raise CheckpointError(f"{name} positions tokens by ALiBi, which Pelton's attention does not have")
    return found


def make(config: Any, max_seq_len: int, implementation: str = attention.NAME) -> Any:
    """The module of ``config`` in float32: parameters and saved buffers on the meta device, tied ones
    shared; computed buffers with their values for engines of ``max_seq_len``."""
    cls = model_class(config)
    if implementation == attention.NAME:
        attention.register()
    with _quiet(), _without_values(), torch.no_grad():
        try:
            model = cls._from_config(config, attn_implementation=implementation, dtype=torch.float32)
            model.tie_weights()
        except KeyError as error:
            if error.args != (attention.NAME,):
                raise
            raise CheckpointError(
                f"{cls.__name__} computes attention by itself instead of through transformers' attention "
                "interface, so it cannot be imported"
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot make this {cls.__name__}: {first_line(error)}"
            ) from error
    saved = model.state_dict(keep_vars=True)
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and f"{module_name}.{name}".lstrip(".") in saved:
                module._buffers[name] = buffer.to("meta")
    _fix_rope(model, config, max_seq_len)
    return model.eval()


def checkpoint_names(model: Any) -> dict[str, str]:
    """What published checkpoints call each tensor of ``model``; raises ``CheckpointError`` where they
    store it in another form."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 both were the same
        return {name: name for name in model.state_dict()}
    saved = model.state_dict(keep_vars=True)
    tensors = {name: torch.empty_like(value) for name, value in saved.items()}
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}
    for name, tensor in tensors.items():
        if id(tensor) not in stored:
            raise CheckpointError(
                f"checkpoints of {type(model).__name__} store {name} in another form, "
                "which is not imported yet"
            )
    return {name: stored[id(tensor)] for name, tensor in tensors.items()}


def unused_tensors(model: Any) -> tuple[str, ...]:
    """Shell patterns of tensors that checkpoints of ``model`` may hold although it does not use them."""
    return tuple(_glob(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def _glob(pattern: str) -> str:
    """The shell pattern of one of ``transformers``' regular expressions, which are searched for."""
    before, after = "" if pattern[0] == "^" else "*", "" if pattern[-1] == "$" else "*"
    return before + pattern.strip("^$").replace("\\.", ".").replace(".*", "*") + after


def unknown_options(config: Any, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of ``config.json`` that the configuration's class does not have."""
    return tuple(sorted(set(values) - set(type(config)().to_dict()) - INERT))


def _fix_rope(model: Any, config: Any, max_seq_len: int) -> None:
    """Choose the frequencies of ropes that change with the longest text so far: an engine's are those
    for ``max_seq_len``, so that a result never depends on other requests."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
            continue
        module.inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](
            config, "cpu", seq_len=max_seq_len
        )
        module.rope_type = "default"


@contextmanager
def _without_values() -> Iterator[None]:
    """Parameters lose their memory as soon as a module registers them, so at most one is ever held."""
    original = torch.nn.Module.register_parameter

    def register_parameter(self: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = type(parameter)(parameter.to("meta"), requires_grad=False)
        original(self, name, parameter)

    torch.nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that ``transformers`` logs about options that do not matter here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _name(values: Mapping[str, Any]) -> str:
    return str((values.get("architectures") or [values.get("model_type", "model")])[0])


def first_line(error: Exception) -> str:
    """The first line of an error, cut where it goes on for long."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= 160 else text[:157] + "..."
