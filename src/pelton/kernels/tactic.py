"""What a tactic is: one implementation of an op, and how the builder finds it.

Each file ``kernels/<op>/<x>.py`` lists its tactics in ``TACTICS``; ``all_tactics`` finds them, and those
that other packages have registered (``kernels/user_tactic.py``).
The native ones name a kernel of the library (``csrc/``); at run time only that name remains, in
the plan. This module needs neither torch nor the library.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pelton.dtypes import KV_CODES, is_dense
from pelton.errors import ConfigError
from pelton.kernels.launch import CallSpec, Work

Kind = Literal["native", "python", "library", "triton"]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a tactic may know of an operand when it is chosen."""

    dtype: str
    shape: tuple[int | str, ...]
    quant: str = ""
    """For weights: the value type."""

    @staticmethod
    def of_weight(quant: str, shape: tuple[int | str, ...]) -> TensorSpec:
        """A weight or constant that is stored as ``quant``."""
        return TensorSpec(dtype=quant if is_dense(quant) else "uint8", shape=shape, quant=quant)


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """An op node as the tactic chooser sees it."""

    op: str
    inputs: tuple[TensorSpec | None, ...]
    attrs: Mapping[str, bool | int | float | str]
    activations: str = "float32"
    """Requested input precision of block-quantised products: float32 or int8."""


@dataclass(frozen=True, kw_only=True)
class Tactic:
    """One implementation of ``op``."""

    name: str
    """Unique; native tactics are called as the library's kernel."""
    op: str
    supports: Callable[[NodeSpec], bool]
    device: str = "cpu"
    priority: int = 0
    """Without timing, the highest priority that supports the node is taken; of equal ones, the tactic that
    is made for the smallest steps."""
    precision: str = "float32"
    """Key into the op's ``tolerance``: how close to the reference it must be."""
    batch_invariant: bool = False
    """A row's result is the same bit for bit whatever other rows and sequences the step has."""
    weight_layouts: Mapping[int, str] = field(default_factory=dict)
    """Layout wanted of each weight operand, by input index (absent: ``rows``)."""
    workspace: Callable[[NodeSpec, int], int] = lambda node, max_tokens: 0
    """Scratch bytes for a step of ``max_tokens`` tokens."""
    kind: Kind = "native"
    """``native``: a kernel of Pelton's library. From outside Pelton: ``python``, a function over NumPy
    arrays; ``library``, a C function compiled into the engine; ``triton``, a launcher of Triton kernels."""
    function: str = ""
    """Of a tactic from outside: "package.module:function", or the C function's name."""
    source: str = ""
    """C source, of kind ``library``."""
    implementation: Callable[..., Any] | None = None
    """What was decorated, of a tactic from outside."""
    largest_tokens: int = 0
    """Largest step, tokens, that it can run; 0: any."""
    above: int = 0
    """Largest step, tokens, that is left to others, although it can run it."""
    sums: Literal["float32", "float16"] = "float32"
    """CUDA: what tensor cores add up in; float16 is for builds that ask for it (``BuildConfig.accumulate``).
    """
    launches: Callable[[CallSpec, int], tuple[Work, ...]] | None = None
    """CUDA: the kernels of a call in steps of at most so many tokens."""
    sm: int = 0
    """CUDA: the compute capability that its kernels are for alone (90); 0: any."""
    decode: Callable[[CallSpec, int], tuple[Work, ...]] | None = None
    """CUDA: the kernels where every sequence of the step has one token; None: ``launches`` too."""

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key: what is taken first without timing comes first."""
        return -self.priority, self.largest_tokens or math.inf, self.name

    def fits(self, tokens: int) -> bool:
        """Whether it is for steps of so many tokens."""
        return self.takes(tokens) and tokens > self.above

    def takes(self, tokens: int) -> bool:
        """Whether it can run steps of so many tokens."""
        return not self.largest_tokens or tokens <= self.largest_tokens


#: Tactics from outside Pelton, by name.
_REGISTERED: dict[str, Tactic] = {}


def register_tactic(tactic: Tactic) -> Tactic:
    """Add a tactic from outside Pelton; raises ``ConfigError`` where its name is taken."""
    if tactic.name in _REGISTERED:
        raise ConfigError(f"two tactics are called {tactic.name}; give one of them a name=")
    _REGISTERED[tactic.name] = tactic
    return tactic


#: Element types of KV caches, and the largest head that the native attention kernels take.
CACHE_DTYPES = ("float32", "float16", "bfloat16", *KV_CODES)
MAX_HEAD_DIM = 512
#: Scratch of each thread of the native library.
SCRATCH_BYTES = 1 << 20


def static_codes(node: NodeSpec, dynamic: str = "") -> str:
    """Type of the codes to which a static scale rounds the product's input; without one ``dynamic``."""
    codes = node.attrs.get("x_codes")
    return dynamic if codes is None else str(codes)


def no_codes(node: NodeSpec) -> bool:
    """Whether neither a static scale rounds the product's input nor one makes its result codes."""
    return not static_codes(node) and not node.attrs.get("y_codes")


def all_float32(node: NodeSpec, besides: tuple[int, ...] = ()) -> bool:
    """Whether every operand, but for the indices ``besides``, is float32 (or int32)."""
    return all(
        t is None or t.dtype in ("float32", "int32") for i, t in enumerate(node.inputs) if i not in besides
    )


def native_caches(node: NodeSpec, k: int, v: int) -> bool:
    """Whether the native kernels take the KV caches at inputs ``k`` and ``v``, float32 besides."""
    k_cache, v_cache = node.inputs[k], node.inputs[v]
    assert k_cache is not None
    assert v_cache is not None
    return (
        all_float32(node, besides=(k, v))
        and no_codes(node)
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in CACHE_DTYPES
        and int(k_cache.shape[3]) <= MAX_HEAD_DIM
    )


#: First compute capability with conversions of fp8.
FP8_SM = 89
#: Steps of up to so many tokens have no kernels with sums in float16: memory bounds them, or large tiles
#: would be too few to fill a GPU.
SMALL_STEPS = 128
#: Element types of the GPU kernels' operands.
GPU_FLOATS = ("float32", "float16", "bfloat16")


def float_rows(node: NodeSpec) -> bool:
    """Whether every operand is float or int32: nothing packed."""
    return all(t is None or (t.quant or t.dtype) in (*GPU_FLOATS, "int32") for t in node.inputs)


def gpu_caches(node: NodeSpec, k: int, v: int, *, codes: bool = False) -> bool:
    """Whether the GPU kernels take the KV caches at inputs ``k`` and ``v``; ``codes``: of 8 bits too."""
    k_cache, v_cache = node.inputs[k], node.inputs[v]
    assert k_cache is not None
    assert v_cache is not None
    besides = (k, v) if codes and k_cache.dtype in KV_CODES else ()
    rest = replace(node, inputs=tuple(None if i in besides else t for i, t in enumerate(node.inputs)))
    return float_rows(rest) and k_cache.dtype == v_cache.dtype and int(k_cache.shape[3]) <= 256


def all_tactics() -> dict[str, Tactic]:
    """Every tactic in ``pelton.kernels``, and those registered from outside, by name."""
    import pelton.kernels as package

    found: dict[str, Tactic] = {}
    for folder in pkgutil.iter_modules(package.__path__):
        if not folder.ispkg:
            continue
        for name, tactic in shipped_tactics(folder.name).items():
            assert name not in found, f"two tactics are called {name}"
            found[name] = tactic
    return found | _REGISTERED


@functools.cache
def shipped_tactics(op: str) -> Mapping[str, Tactic]:
    """The tactics of one op that Pelton ships, by name; only their modules are imported."""
    package = importlib.import_module(f"pelton.kernels.{op}")
    found: dict[str, Tactic] = {}
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name.rpartition(".")[2].startswith("triton_"):
            continue  # a kernel's source: imported where it is compiled
        for tactic in getattr(importlib.import_module(module.name), "TACTICS", ()):
            assert tactic.name not in found, f"two tactics are called {tactic.name}"
            found[tactic.name] = tactic
    return found
