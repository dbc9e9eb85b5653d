"""Pelton's attention and mask functions as ``transformers`` calls them through its interfaces.

While a module is captured, its attention calls become one op each, ``pelton_import::attention``, which
only says what it is given; ``canonical`` turns it into ``kv_write`` and ``paged_attention``. Which keys a
query sees is not guessed from options: the mask function that ``transformers`` would fill a mask with
is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

NAME = "pelton"
"""What ``attn_implementation`` is called."""

LIBRARY = torch.library.Library("pelton_import", "DEF")
LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, float scale, int window, float softcap, int layer, "
    "Tensor? sinks) -> Tensor"
)

#: Arguments that say nothing about the result here: no cache, no dropout, masks and positions elsewhere.
_INERT = frozenset(
    """
    attentions cache cache_position cache_positions cu_seq_lens_k cu_seq_lens_q deterministic dropout
    head_mask is_causal layer_idx max_length_k max_length_q output_attentions output_hidden_states
    past_key_value past_key_values position_embeddings position_ids sliding_window token_type_ids
    training use_cache
    """.split()  # noqa: SIM905  one word a line says nothing more
)


class NotImportable(Exception):
    """What a module does that an engine cannot, as a sentence's end."""


@dataclass(frozen=True)
class Mask:
    """What stands for the mask on its way to the attention function: nothing else may look at it."""

    window: int
    """Sliding window in tokens, 0: full."""

    def __getattr__(self, name: str) -> Any:
        raise NotImportable(f"uses its attention mask by itself (mask.{name})")

    def __getitem__(self, index: Any) -> Any:
        raise NotImportable("cuts its attention mask by itself")


_OTHER_MASK = "has an attention mask that is neither causal nor a sliding window"

#: Longest sequence of the module being captured; what tells windows from full attention.
LENGTH: ContextVar[int] = ContextVar("length", default=0)
#: Calls of the attention function so far.
CALLS: ContextVar[list[Any]] = ContextVar("calls")


def mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> Mask:
    """The mask function of ``transformers``' AttentionMaskInterface."""
    with _disable_current_modes():
        return Mask(window_of(mask_function, LENGTH.get()))


def window_of(mask_function: Callable[..., Any], length: int) -> int:
    """The window, 0 for full causal attention up to ``length`` tokens.

    Raises ``NotImportable`` where a query sees anything but the last so many keys up to its own.
    """
    queries = torch.arange(length, device="cpu")
    zero = torch.zeros((), dtype=torch.long, device="cpu")

    def sees(query: Any, key: Any) -> Any:
        seen = mask_function(zero, zero, query, key)
        return seen.expand(torch.broadcast_shapes(query.shape, key.shape))

    window = int(sees(queries[-1], queries).sum())
    for query in {0, 1, 2, length // 3, length // 2, length - 1} & set(range(length)):
        want = (queries <= query) & (queries > query - window)
        if not torch.equal(sees(queries[query], queries), want):
            raise NotImportable(_OTHER_MASK)
    for distance in (-1, 0, 1, window // 2, window - 1, window):
        places = queries[max(0, distance) : length + min(0, distance)]
        want = torch.full(places.shape, 0 <= distance < window, device="cpu")
        if not torch.equal(sees(places, places - distance), want):
            raise NotImportable(_OTHER_MASK)
    return 0 if window >= length else window


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Any, None]:
    """The attention function of ``transformers``' AttentionInterface.

    ``query``: (1, heads, T, D); ``key``, ``value``: (1, kv_heads, T, D) -> (1, T, heads, D). ``s_aux``
    among ``kwargs``: (heads,), sinks.
    """
    scale, softcap, sinks = (kwargs.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
    calls = CALLS.get()
    if not isinstance(attention_mask, Mask):
        raise NotImportable("makes its attention mask by itself")
    if args:
        raise NotImportable("passes more to attention than queries, keys, values and a mask")
    for name, given in kwargs.items():
        if given is not None and name not in _INERT:
            raise NotImportable(f"gives attention {name!r}, which Pelton's attention does not have")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise NotImportable(f"gives attention sinks of shape {list(sinks.shape)}, not one a head")
    calls.append(module)
    out = torch.ops.pelton_import.attention(
        query,
        key,
        value,
        float(query.shape[-1] ** -0.5 if scale is None else scale),
        attention_mask.window,
        float(softcap or 0.0),
        len(calls) - 1,
        sinks,
    )
    return out, None


def _shape_of_attention(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


LIBRARY.impl("attention", _shape_of_attention, "CompositeExplicitAutograd")


def register() -> None:
    """Make both known to ``transformers`` under ``NAME``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
