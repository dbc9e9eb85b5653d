"""``compiled/code.json`` of an engine for a GPU: its kernels, and what each instruction launches."""

from __future__ import annotations

import msgspec

from pelton.kernels.launch import Argument, Term

#: Kernels besides the plan's (``Code.step_kernels``).
STEP_KERNELS = frozenset(
    ("stage", "scan", "histogram", "choose", "mark", "keep", "bias", "edit", "count", "logprobs")
)


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled kernel."""

    file: str
    """The cubin, relative to the engine."""
    name: str
    """Its entry point."""
    threads: int
    shared: int
    """Dynamic shared memory, bytes."""
    scratch: int
    """Trailing pointer parameters that the compiler added and this engine leaves null."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="kernel"):
    """A kernel (index into ``Code.kernels``) with its grid and arguments (``kernels.launch``)."""

    kernel: int
    grid: tuple[tuple[Term, ...], ...]
    arguments: tuple[Argument, ...]
    dependent: bool = False
    """Launched while the kernel before it still runs: it waits for that one itself."""
    footprint: int = 0
    """Dynamic shared memory that it is given at least, bytes."""


class Matmul(msgspec.Struct, frozen=True, kw_only=True, tag="matmul"):
    """A product by cuBLASLt (``kernels.launch.MatmulSpec``)."""

    n: int
    k: int
    x_row: int
    dtype: str
    out_dtype: str
    x: Argument
    weight: Argument
    out: Argument
    residual: Argument | None = None
    residual_row: int = 0
    x_scales: Argument | None = None
    weight_scales: Argument | None = None


Work = Launch | Matmul


class Variants(msgspec.Struct, frozen=True, kw_only=True):
    """What a tactic puts into the stream."""

    any: tuple[Work, ...]
    """For any step."""
    decode: tuple[Work, ...] | None = None
    """Where every sequence has one token; None: ``any``."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """All of a plan's launches: by instruction, then by the name of the tactic."""

    sm: int
    """Compute capability that the cubins are for."""
    kernels: tuple[Kernel, ...]
    launches: tuple[dict[str, Variants], ...]
    step_kernels: dict[str, int]
    """By name, the kernels that bring a step's inputs in and take tokens from its logits."""
    dependent: tuple[str, ...] = ()
    """Those of them that can be launched while the kernel before them runs: they wait for it themselves."""
    interface: str
    """What they take: ``kernels.step_kernels.interface`` of the Pelton that compiled them."""
