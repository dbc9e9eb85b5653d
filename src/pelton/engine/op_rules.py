"""The shapes that each native op asks of its operands, as far as memory safety needs them. No torch.

Kernels trust shapes: this table is the executable form of what they may trust, and what a plan is held
to before it runs (``instruction_check``). A row reads ``inputs -> outputs | attributes``:

- ``x:T,K`` an input of two dimensions; a letter means the same size everywhere in the row, ``2N`` twice it;
- ``t``, ``n`` the step's tokens, its rows of logits;
- ``...,D`` any dimensions before the last; ``*`` any shape, the same everywhere;
- ``bias?`` may be absent; ``#name`` the step input of that name (int32; ``#a|b`` one or
  the other); ``@`` bytes (uint8).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pelton.engine.plan import Dim

Shape = tuple[Dim, ...]
Bound = dict[str, Dim | Shape]

#: Columns per block of rows quantised in a step, and bytes of a block (``quantize_q8``).
Q8_BLOCK, Q8_BLOCK_BYTES = 32, 44


def _q8(b: Bound) -> bool:
    columns = b.get("K", 0)
    return (
        isinstance(columns, int)
        and columns % Q8_BLOCK == 0
        and b["Q"] == columns // Q8_BLOCK * Q8_BLOCK_BYTES
    )


def _heads(b: Bound) -> bool:
    h, s = b["H"], b["S"]
    return isinstance(h, int) and isinstance(s, int) and s > 0 and h % s == 0


def _rotary(b: Bound) -> bool:
    r, d = b["R"], b["D"]
    return isinstance(r, int) and isinstance(d, int) and r % 2 == 0 and r <= d


_PLAIN = "x:* -> *"
_TABLE: dict[str, tuple[str, tuple[Callable[[Bound], bool], ...]]] = {
    "activation": (_PLAIN + " | kind", ()),
    "add": ("x:* y:* -> *", ()),
    "add_rms_norm": ("x:T,K residual:T,K weight:K -> T,K T,K | eps", ()),
    "add_rms_norm_q8": ("x:T,K residual:T,K weight:K -> @T,Q T,K | eps", (_q8,)),
    "binary_scalar": (_PLAIN + " | value kind", ()),
    "embedding": ("#input_ids|positions:t weight:V,K -> t,K", ()),
    "gated_activation": ("gate:* up:* -> * | kind", ()),
    "kv_write": (
        "k:t,S,D v:t,S,D k_cache:P,S,B,D v_cache:P,S,B,D #slot_mapping:t k_scale?:S v_scale?:S"
        " k_shift?:S,D k_queries?:S,2D ->",
        (),
    ),
    "layer_norm": ("x:...,K weight?:K bias?:K -> ...,K | eps", ()),
    "linear": ("x:T,K weight:N,K bias?:N -> T,N", ()),
    "linear_add": ("x:T,K weight:N,K bias?:N residual:T,N -> T,N", ()),
    "linear_gated": ("x:T,K weight:2N,K bias?:2N -> T,N | kind", ()),
    "linear_gated_q8": ("@x:T,Q weight:2N,K bias?:2N -> T,N | kind", (_q8,)),
    "linear_q8": ("@x:T,Q weight:N,K bias?:N -> T,N", (_q8,)),
    "mul": ("x:* y:* -> *", ()),
    "norm_linear": ("x:T,K weight:N,K bias?:N norm_weight:K -> T,N | eps", ()),
    "norm_linear_gated": ("x:T,K weight:2N,K bias?:2N norm_weight:K -> T,N | kind eps", ()),
    "paged_attention": (
        "q:t,H,D k_cache:P,S,B,D v_cache:P,S,B,D #block_table:R,M #cu_seqlens:C #seq_lens:R"
        " k_scale?:S v_scale?:S sinks?:H -> t,H,D"
        " | scale window softcap",
        (_heads,),
    ),
    "quantize_q8": ("x:T,K -> @T,Q", (_q8,)),
    "rms_norm": ("x:...,K weight:K -> ...,K | eps", ()),
    "rms_norm_q8": ("x:T,K weight:K -> @T,Q | eps", (_q8,)),
    "rope": ("x:T,H,D cos_sin:T,R -> T,H,D", (_rotary,)),
    "rope_cos_sin": ("#positions:t inv_freq:F -> t,2F | scale", ()),
    "rope_interleaved": ("x:T,H,D cos_sin:T,R -> T,H,D", (_rotary,)),
    "rope_kv_write": (
        "q:t,H,D k:t,S,D v:t,S,D cos_sin:t,R k_cache:P,S,B,D v_cache:P,S,B,D #slot_mapping:t"
        " q_weight?:D k_weight?:D k_scale?:S v_scale?:S k_shift?:S,D k_queries?:S,2D -> t,H,D | eps",
        (_rotary,),
    ),
    "scale": (_PLAIN + " | factor", ()),
    "softcap": (_PLAIN + " | cap", ()),
    "softmax": (_PLAIN, ()),
    "take_columns": ("x:T,K order:K -> T,K", ()),
    "take_rows": ("x:t,K #logits_indices:n -> n,K", ()),
    "unary": (_PLAIN + " | kind", ()),
}


@dataclass(frozen=True, kw_only=True)
class Term:
    """One operand of a rule."""

    name: str
    dims: tuple[str, ...]
    optional: bool = False
    step_input: bool = False
    bytes: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table."""

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    attrs: tuple[str, ...]
    where: tuple[Callable[[Bound], bool], ...] = ()
    matches: Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, object]], bool] | None = None
    """For what letters cannot say: whether shapes of inputs and outputs go together."""


def _term(text: str) -> Term:
    name, _, dims = text.rpartition(":")
    marks = text[0] if text[0] in "#@" else ""
    return Term(
        name=name.strip("#@?"),
        dims=tuple(dims.strip("@").split(",")),
        optional=name.endswith("?"),
        step_input=marks == "#",
        bytes=marks == "@",
    )


def _rule(text: str, where: tuple[Callable[[Bound], bool], ...]) -> Rule:
    operands, _, attrs = text.partition(" | ")
    inputs, _, outputs = operands.partition("->")
    return Rule(
        inputs=tuple(map(_term, inputs.split())),
        outputs=tuple(map(_term, outputs.split())),
        attrs=tuple(attrs.split()),
        where=where,
    )


def _broadcast(inputs: Sequence[Shape], outputs: Sequence[Shape], attrs: Mapping[str, object]) -> bool:
    out = outputs[0]
    for shape in inputs:
        if len(shape) > len(out):
            return False
        aligned = zip(reversed(shape), reversed(out), strict=False)
        if any(a not in (1, b) for a, b in aligned):
            return False
    return True


def _reduced(inputs: Sequence[Shape], outputs: Sequence[Shape], attrs: Mapping[str, object]) -> bool:
    kept = inputs[0][:-1]
    return bool(inputs[0]) and outputs[0] == ((*kept, 1) if attrs["keepdim"] else kept)


def _same(inputs: Sequence[Shape], outputs: Sequence[Shape], attrs: Mapping[str, object]) -> bool:
    return inputs[0] == outputs[0]


def _free(name: str) -> Term:
    return Term(name=name, dims=("*",))


RULES: dict[str, Rule] = {name: _rule(*row) for name, row in _TABLE.items()} | {
    "binary": Rule(
        inputs=(_free("x"), _free("y")), outputs=(_free("out"),), attrs=("kind",), matches=_broadcast
    ),
    "copy": Rule(inputs=(_free("x"),), outputs=(_free("out"),), attrs=(), matches=_same),
    "reduce": Rule(
        inputs=(_free("x"),), outputs=(_free("out"),), attrs=("kind", "keepdim"), matches=_reduced
    ),
}

_LITERAL = {"t": "T", "n": "N"}


def bind(term: Term, shape: Shape, bound: Bound) -> bool:
    """Whether ``shape`` fits ``term``, given the letters in ``bound``; new ones are added."""
    dims = term.dims
    if dims == ("*",):
        return bound.setdefault("*", shape) == shape
    if dims[0] == "...":
        if len(shape) < len(dims) - 1:
            return False
        cut = len(shape) - len(dims) + 1
        if bound.setdefault("...", shape[:cut]) != shape[:cut]:
            return False
        dims, shape = dims[1:], shape[cut:]
    if len(dims) != len(shape):
        return False
    return all(_bind_dim(text, value, bound) for text, value in zip(dims, shape, strict=True))


def _bind_dim(text: str, value: Dim, bound: Bound) -> bool:
    if text in _LITERAL:
        return value == _LITERAL[text]
    match = re.fullmatch(r"(\d*)([A-Z])", text)
    assert match is not None, f"{text!r} is no dimension of a rule"
    factor, letter = int(match[1] or 1), match[2]
    if factor == 1:
        return bound.setdefault(letter, value) == value
    if not isinstance(value, int) or value % factor:
        return False
    return bound.setdefault(letter, value // factor) == value // factor
