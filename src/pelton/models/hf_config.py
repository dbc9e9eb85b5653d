"""Reading a Hugging Face ``config.json``: typed, complete, and never silent about an option.

A model reads the keys it implements and says which values it supports of those it does not
(``expect``). What nobody asked for and is not known to be inert ends in ``unread()``, which the
build reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pelton.errors import CheckpointError

#: Hugging Face's activation names -> the kinds of the ops ``activation`` and ``gated_activation``.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

#: Keys that say nothing about the computation of logits at inference.
INERT = frozenset(
    """
    _name_or_path add_cross_attention architectures attention_dropout attn_implementation
    _attn_implementation_autoset attn_pdrop auto_map bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout dtype embd_pdrop eos_token_id finetuning_task
    hidden_dropout id2label initializer_range is_llama_config is_encoder_decoder label2id model_type
    n_ctx name_or_path pad_token_id pretraining_tp problem_type resid_pdrop return_dict
    output_attentions output_hidden_states
    reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype
    transformers_version transformers.js_config unk_token_id unsloth_fixed unsloth_version use_cache
    """.split()  # noqa: SIM905  one word a line says nothing more
)

#: Options that change the computation and that no model implements: (key, values that mean "off").
_UNIMPLEMENTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("quantization_config", (None,)),
    ("compression_config", (None,)),
    ("use_bidirectional_attention", (None, False)),
    ("rope_interleaved", (None, False)),
    ("num_local_experts", (None, 0)),
    ("num_experts", (None, 0)),
    ("add_cross_attention", (None, False)),
    ("is_encoder_decoder", (None, False)),
)

_ROPE_DEFAULT_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")


class HFConfig:
    """A ``config.json`` being read by the architecture ``name``."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._values = dict(values)
        self._read: set[str] = set()
        self._children: list[HFConfig] = []
        for key, off in _UNIMPLEMENTED:
            self.expect(key, *off)

    def get(self, key: str, default: Any = None) -> Any:
        """The value; ``default`` where the key is absent or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def child(self, key: str, defaults: Mapping[str, Any]) -> HFConfig:
        """The nested configuration ``key``, on top of ``defaults``; raises ``CheckpointError`` if none."""
        values = self.get(key)
        if not isinstance(values, dict):
            raise CheckpointError(f"config.json of this {self.name} has no {key!r}")
        self._children.append(HFConfig({**defaults, **values}, self.name))
        return self._children[-1]

    def nullable(self, key: str, absent: Any = None) -> Any:
        """The value, null included; ``absent`` only where the key is not there at all."""
        self._read.add(key)
        return self._values.get(key, absent)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; raises ``CheckpointError`` where it is absent or something else."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"config.json of this {self.name} has no {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; raises ``CheckpointError`` where it is absent or something else."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"config.json of this {self.name} has no {key!r}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; raises ``CheckpointError`` on something else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be true or false, not {value!r}")
        return value

    def expect(self, key: str, *supported: Any) -> None:
        """Raise ``CheckpointError`` unless the key is absent or has one of the ``supported`` values."""
        self._read.add(key)
        value = self._values.get(key, supported[0])
        if value not in supported:
            shown = str(value) if len(str(value)) < 80 else str(value)[:77] + "..."
            raise CheckpointError(
                f"config.json: {key}={shown} is not implemented for {self.name} "
                f"(supported: {', '.join(map(str, supported))})"
            )

    def activation(self, key: str, default: str) -> str:
        """The activation's kind; raises ``CheckpointError`` on an unknown one."""
        value = self.get(key, default)
        if value not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: {key}={value!r} is not implemented (known: {', '.join(ACTIVATIONS)})"
            )
        return ACTIVATIONS[value]

    def rope(
        self, *, default_theta: float = 10000.0, layer_type: str | None = None, theta_key: str = "rope_theta"
    ) -> dict[str, Any]:
        """RoPE parameters in the form ``nn.rope_frequencies`` takes.

        Read from ``rope_parameters`` (transformers 5; per layer type when ``layer_type`` is given and
        the dict is nested) or ``rope_scaling`` with ``rope_theta`` beside it. The type is called
        ``rope_type`` or, formerly, ``type``; Phi-3 calls longrope "su".
        """
        nested = self.get("rope_parameters", {})
        scaling = self.get("rope_scaling", {})
        if layer_type is not None and nested:
            if not isinstance(nested.get(layer_type), dict):
                raise CheckpointError(f"config.json: rope_parameters of {self.name} lacks {layer_type!r}")
            own = dict(nested[layer_type])
        else:
            own = dict(nested)
        if scaling and layer_type != "sliding_attention":
            own = {**own, **scaling}
        own = {k: v for k, v in own.items() if v is not None}
        kind = own.pop("type", "default")
        own.setdefault("rope_type", kind)
        if own["rope_type"] == "su":
            own["rope_type"] = "longrope"
        own.setdefault("rope_theta", self.get(theta_key, default_theta))
        own.setdefault("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        original = self.get("original_max_position_embeddings")
        if original is not None and own["rope_type"] in ("llama3", "yarn", "longrope"):
            own["original_max_position_embeddings"] = original
        if own["rope_type"] == "default":
            # A leftover scaling key with a default type would be silently ignored: say so instead.
            extra = [
                k for k in own if k not in _ROPE_DEFAULT_KEYS and k != "original_max_position_embeddings"
            ]
            if extra:
                raise CheckpointError(
                    f"config.json: RoPE of type 'default' has {', '.join(extra)}: give rope_type"
                )
        return own

    def windows(self, window: int | None, *, slides: Sequence[bool], max_seq_len: int) -> tuple[int, ...]:
        """Sliding window of each layer, 0 for full attention.

        ``layer_types`` says which layers slide, else ``slides``, one entry a layer. A window that no
        sequence of the engine can outgrow is the same as none.
        """
        layer_types = self.get("layer_types")
        if layer_types is not None:
            known = {"full_attention": False, "sliding_attention": True}
            unknown = sorted(set(layer_types) - set(known))
            if unknown:
                raise CheckpointError(
                    f"config.json: layer_types contains {', '.join(unknown)} (known: {', '.join(known)})"
                )
            if len(layer_types) != len(slides):
                raise CheckpointError(
                    f"config.json: layer_types has {len(layer_types)} entries for {len(slides)} layers"
                )
            slides = [known[t] for t in layer_types]
        if not any(slides):
            return (0,) * len(slides)
        if not isinstance(window, int) or window < 1:
            raise CheckpointError(
                f"config.json: some layers slide, so sliding_window must be a positive integer, not {window}"
            )
        return tuple(window if s and window < max_seq_len else 0 for s in slides)

    def unread(self) -> tuple[str, ...]:
        """Keys that were not read and are not known to be inert, sorted; of nested ones too."""
        own = set(self._values) - self._read - INERT
        return tuple(sorted(own.union(*(child.unread() for child in self._children))))
