"""The base of every model: the step contract and the layout of its KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pelton.nn.attention import AttentionInputs
from pelton.nn.module import Module


class LayerKV(NamedTuple):
    """What one layer caches per token."""

    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in tokens, 0: full."""


class KVLayout(NamedTuple):
    """Layers that share a block table: all of the same ``LayerKV``."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int


class CausalLM(Module):
    """A decoder-only language model: packed tokens in, logits of chosen rows out."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    ignored_options: tuple[str, ...] = ()
    """Keys of the checkpoint's configuration that Pelton does not know; the build reports them."""
    source_shapes: Mapping[str, tuple[int, ...]] | None = None
    """Shapes of the checkpoint's tensors by name, of a model whose recipes do not say them."""
    notes: tuple[str, ...] = ()
    """Sentences about the model for the build report."""

    @abstractmethod
    def layer_kv(self) -> Sequence[LayerKV]:
        """What each layer caches, in the layers' order."""

    @abstractmethod
    def forward(
        self,
        input_ids_T: Any,
        positions_T: Any,
        k_caches: Sequence[Any],
        v_caches: Sequence[Any],
        groups: Sequence[AttentionInputs],
        logits_indices_N: Any,
    ) -> Any:
        """One step -> logits (N, V) float32.

        ``k_caches[layer]``, ``v_caches[layer]``: (blocks, kv_heads, block_size, head_dim), written in
        place; ``groups`` in the order of ``kv_groups()``; the rest int32.
        """

    def kv_groups(self) -> tuple[KVLayout, ...]:
        """Layers grouped by equal ``LayerKV``, in the order of their first layers."""
        members: dict[LayerKV, list[int]] = {}
        for layer, kv in enumerate(self.layer_kv()):
            members.setdefault(kv, []).append(layer)
        return tuple(KVLayout(tuple(layers), *kv) for kv, layers in members.items())

    def group_of_layer(self) -> tuple[int, ...]:
        """Index into ``kv_groups()`` of each layer."""
        groups = list(dict.fromkeys(self.layer_kv()))
        return tuple(groups.index(kv) for kv in self.layer_kv())

    unused_tensors: tuple[str, ...] = ()
    """Shell patterns of checkpoint tensors that belong to parts this model leaves out (a vision
    tower); any other tensor that no parameter asks for is an error."""

    def tied(self) -> dict[str, str]:
        """Checkpoint tensors that need not exist because another is used: name -> that other's name.

        ``{"lm_head.weight": "model.embed_tokens.weight"}`` for a tied language-model head.
        """
        first: dict[int, str] = {}
        tied = {}
        for name, value in self.named_parameters(remove_duplicate=False):
            original = first.setdefault(id(value), name)
            if original != name:
                tied[self.source_name(name)] = self.source_name(original)
        return tied

    def source_name(self, parameter_name: str) -> str:
        """Name of the checkpoint tensor behind a parameter; the same unless a model overrides it."""
        return parameter_name
