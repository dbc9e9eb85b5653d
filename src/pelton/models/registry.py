"""Architectures by the name in ``config.json``; a model is one file and one row here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch

from pelton import nn, plugins
from pelton.errors import CheckpointError
from pelton.models.hf_config import HFConfig
from pelton.models.transformers_import import import_model
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
    """The architecture's name: the first that Pelton has a file for, else the first; raises
    ``CheckpointError`` where there is none."""
    names = hf_config.get("architectures") or []
    if not names:
        raise CheckpointError("config.json has no 'architectures': it does not say which model this is")
    return next((str(name) for name in names if is_known(name)), str(names[0]))


def is_known(name: str) -> bool:
    """Whether Pelton, or a package that is installed, has the architecture's model."""
    if name not in ARCHITECTURES:
        plugins.load("pelton.models", name)
    return name in ARCHITECTURES


def create_model(hf_config: Mapping[str, Any], *, max_seq_len: int, impl: str = "auto") -> nn.CausalLM:
    """The model of a Hugging Face configuration, on the meta device: parameters take no memory.

    ``max_seq_len`` is the engine's: RoPE tables that depend on length are made for it, and sliding
    windows that reach as far become full attention. ``impl``: "pelton" for the architecture's own file,
    "transformers" to import the model, "auto" for the file where there is one. Raises
    ``CheckpointError`` on an unknown architecture and on an option that the model does not implement.
    """
    name = architecture_of(hf_config)
    own = is_known(name)
    model: nn.CausalLM
    if impl == "transformers" or (impl == "auto" and not own):
        model = import_model(hf_config, max_seq_len=max_seq_len)
        why = "as model_impl asks" if own else "since Pelton has no file of its own for it"
        model.notes = (f"{name} is imported from {model.origin}, {why}",)
        return model
    if not own:
        raise CheckpointError(
            f"the architecture {name} is not implemented (known: {', '.join(sorted(ARCHITECTURES))}); "
            "model_impl transformers imports others"
        )
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
