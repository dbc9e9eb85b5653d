"""Architectures by the name in ``config.json``; a model is one file and one row here."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch

from pelton import nn
from pelton.errors import CheckpointError
from pelton.models.hf_config import HFConfig
from pelton.registry import Registry

M = TypeVar("M", bound=nn.CausalLM)


class ModelClass(Protocol):
    """What a row names: a ``CausalLM`` class that can be made from a configuration."""

    def from_config(self, hf: HFConfig, max_seq_len: int) -> nn.CausalLM:
        """The model on the current default device; raises ``CheckpointError`` on what it lacks."""
        ...


#: architecture -> "module:class", imported on use; other packages' classes are added by
#: ``register_model``.
ARCHITECTURES: Registry[str | ModelClass] = Registry("architecture")
for _name, _where in {
    "LlamaForCausalLM": "pelton.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "pelton.models.mistral:MistralForCausalLM",
    "MinistralForCausalLM": "pelton.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "pelton.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "pelton.models.qwen3:Qwen3ForCausalLM",
    "GemmaForCausalLM": "pelton.models.gemma:GemmaForCausalLM",
    "Gemma2ForCausalLM": "pelton.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "pelton.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "pelton.models.gemma3:Gemma3ForConditionalGeneration",
    "Phi3ForCausalLM": "pelton.models.phi3:Phi3ForCausalLM",
    "GPT2LMHeadModel": "pelton.models.gpt2:GPT2LMHeadModel",
}.items():
    ARCHITECTURES.add(_name, _where)


def register_model(name: str) -> Callable[[type[M]], type[M]]:
    """Class decorator that makes the ``CausalLM`` class the architecture called ``name``.

    A package outside Pelton names the module that does so in its entry points, and needs no fork:
    ``[project.entry-points."pelton.models"]``, ``MyForCausalLM = "my_package.model"``.
    """

    def register(cls: type[M]) -> type[M]:
        ARCHITECTURES.add(name, cast(ModelClass, cls))
        return cls

    return register


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """The architecture's name; raises ``CheckpointError`` where it is missing or unknown."""
    names = hf_config.get("architectures") or []
    if not names:
        raise CheckpointError("config.json has no 'architectures': it does not say which model this is")
    for name in names:
        if name not in ARCHITECTURES:
            for entry in importlib.metadata.entry_points(group="pelton.models", name=name):
                entry.load()
        if name in ARCHITECTURES:
            return str(name)
    raise CheckpointError(
        f"the architecture {names[0]} is not implemented (known: {', '.join(sorted(ARCHITECTURES))})"
    )


def create_model(hf_config: Mapping[str, Any], *, max_seq_len: int) -> nn.CausalLM:
    """The model of a Hugging Face configuration, on the meta device: parameters take no memory.

    ``max_seq_len`` is the engine's: RoPE tables that depend on length are made for it, and sliding
    windows that reach as far become full attention. Raises ``CheckpointError`` on an unknown
    architecture and on an option that the model does not implement.
    """
    name = architecture_of(hf_config)
    entry = ARCHITECTURES[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = cast(ModelClass, getattr(importlib.import_module(module), attribute))
    hf = HFConfig(hf_config, name)
    with torch.device("meta"):
        model = entry.from_config(hf, max_seq_len)
    model.ignored_options = hf.unread()
    model.eval()
    return model
