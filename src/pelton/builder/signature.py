"""What the time of a call depends on: calls with equal signatures are timed once.

A signature is a call at a bucket's sizes: op, operands (type, shape, strides, quantisation),
attributes, precision of activations, threads, the step around it, and how many bytes of weights pass
through the caches before the same weight comes again. Its text is the timing cache's key. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from pelton.builder.calls import Attr, Call, Value
from pelton.builder.profiles import Bucket
from pelton.engine.plan import Dim
from pelton.kernels.tactic import NodeSpec

#: Tokens that a sequence has in its KV cache when attention is timed (fewer where ``max_seq_len`` is).
CONTEXT = 512
#: Tokens of the largest step in which tactics are checked.
CHECK_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class OperandSignature:
    """An operand at known sizes."""

    kind: str
    """value (an intermediate tensor), weight, cache (KV) or the name of a step input."""
    dtype: str
    """Element type; for weights the value type, such as ``q4_1``."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    """In elements; empty: contiguous."""

    def __str__(self) -> str:
        name = "" if self.kind in ("value", "weight") else f"{self.kind}:"
        strides = f"/{','.join(map(str, self.strides))}" if self.strides else ""
        return f"{name}{self.dtype}[{','.join(map(str, self.shape))}{strides}]"


@dataclass(frozen=True, kw_only=True)
class StepSignature:
    """The step whose indices an operand holds: every sequence but the first has one new token."""

    tokens: int
    sequences: int
    context: int
    """Tokens whose KV each sequence has, this step's included."""

    @property
    def queries(self) -> tuple[int, ...]:
        """New tokens of each sequence."""
        return (self.tokens - self.sequences + 1, *(1 for _ in range(self.sequences - 1)))

    @property
    def keys(self) -> tuple[int, ...]:
        """Tokens of each sequence in the cache after the step."""
        return tuple(max(n, self.context) for n in self.queries)

    def blocks(self, block_size: int) -> int:
        """KV blocks in use."""
        return sum(-(-n // block_size) for n in self.keys)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A call at a bucket's sizes."""

    op: str
    inputs: tuple[OperandSignature | None, ...]
    attrs: Mapping[str, Attr]
    activations: str
    threads: int
    step: StepSignature | None
    """None where no operand depends on it."""
    reuse_bytes: int
    """Weight bytes read between two uses of one weight, a power of two: what caches cannot hold is
    cold."""
    tokens: int
    """T of the step: sizes workspaces."""
    small: Signature | None = field(default=None, compare=False)
    """The call in a step of ``CHECK_TOKENS`` tokens, where this one has more: references are slow."""

    @cached_property
    def key(self) -> str:
        """Text that tells it from any other."""
        inputs = ", ".join("-" if o is None else str(o) for o in self.inputs)
        parts = [f"{self.op}({inputs})"]
        parts += [f"{name}={value}" for name, value in self.attrs.items()]
        parts.append(f"activations={self.activations}")
        if self.step is not None:
            parts.append(f"step={self.step.tokens}/{self.step.sequences}/{self.step.context}")
        parts += [f"threads={self.threads}", f"reuse={self.reuse_bytes >> 10}k"]
        return " ".join(parts)

    @property
    def shape(self) -> str:
        """For people: shapes of the tensors."""
        return " ".join(
            "x".join(map(str, o.shape)) for o in self.inputs if o is not None and len(o.shape) > 1
        )

    def with_weight_rows(self, rows: int) -> Signature:
        """The same call on weights of at most ``rows`` rows (vectors as long as them shortened too)."""
        tall = self.weight_rows
        if tall <= rows:
            return self

        def cut(o: OperandSignature | None) -> OperandSignature | None:
            if o is None or o.kind != "weight" or o.shape[0] != tall:
                return o
            return replace(o, shape=(rows, *o.shape[1:]))

        return replace(self, inputs=tuple(map(cut, self.inputs)))

    @property
    def weight_rows(self) -> int:
        """Rows of the largest weight matrix; 0: there is none."""
        matrices = [o.shape for o in self.inputs if o is not None and o.kind == "weight" and len(o.shape) > 1]
        return max(matrices, key=math.prod)[0] if matrices else 0


def signature_of(
    call: Call,
    spec: NodeSpec,
    bucket: Bucket,
    *,
    context: int,
    threads: int,
    reuse_bytes: int,
) -> Signature:
    """``call`` at the sizes of ``bucket``. ``context``: see ``StepSignature``."""
    small = None
    if bucket.dims["T"] > CHECK_TOKENS:
        dims = {dim: min(size, CHECK_TOKENS) for dim, size in bucket.dims.items()}
        less = Bucket(max_tokens=CHECK_TOKENS, dims=dims)
        small = signature_of(
            call, spec, less, context=min(context, CHECK_TOKENS), threads=threads, reuse_bytes=reuse_bytes
        )
    step = StepSignature(tokens=bucket.dims["T"], sequences=bucket.dims["B"], context=context)
    sizes: dict[str, int] = {**bucket.dims, "B+1": bucket.dims["B"] + 1}
    caches = [v for v in call.inputs if v is not None and _kind(v) == "cache"]
    for value in caches:
        # Caches hold the step's blocks, whatever the session will have.
        sizes[str(value.shape[0])] = step.blocks(int(value.shape[2]))

    def operand(value: Value | None, index: int) -> OperandSignature | None:
        if value is None:
            return None
        shape = tuple(_size(d, sizes) for d in value.shape)
        quant = spec.inputs[index]
        assert quant is not None
        kind = _kind(value)
        strides = () if kind == "weight" or value.strides == _contiguous(shape) else value.strides
        return OperandSignature(
            kind=kind, dtype=quant.quant or value.root.dtype, shape=shape, strides=strides
        )

    inputs = tuple(operand(v, i) for i, v in enumerate(call.inputs))
    depends = any(o is not None and o.kind not in ("value", "weight") for o in inputs)
    return Signature(
        op=call.op.name,
        inputs=inputs,
        attrs=call.attrs,
        activations=spec.activations,
        threads=threads,
        step=step if depends else None,
        reuse_bytes=1 << max(0, reuse_bytes - 1).bit_length(),
        tokens=bucket.dims["T"]
        if depends
        else max((o.shape[0] for o in inputs if o and o.kind == "value"), default=1),
        small=small,
    )


def _kind(value: Value) -> str:
    source = value.root.source
    if source is None:
        return "value"
    if source.kind == "input":
        return source.name.split(".")[0]
    return "cache" if source.kind in ("k_cache", "v_cache") else "weight"


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return sizes[dim] if isinstance(dim, str) else dim


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
