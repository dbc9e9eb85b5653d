"""The kernels that every engine for a GPU carries besides its plan's, and what they and this Pelton agree on.

The plan's kernels travel with the arguments they are launched with. These are given theirs, and memory to
work in, by the Pelton that runs the engine, which may be another one than has compiled them. Of the plan's
kernels that holds for counters and for how copied tiles lie.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

from pelton.kernels.gpu.nvrtc import KERNELS
from pelton.kernels.gpu.tensor_maps import SWIZZLE
from pelton.kernels.launch import COUNTER_BYTES, CudaSource, Source
from pelton.kernels.sampling.cuda import (
    IN_PROMPT,
    LIST_ROOM,
    LOGITS_KINDS,
    MOST_LOGPROBS,
    SamplerBytes,
    edit_sources,
    mask_words,
    sampler_sources,
)
from pelton.kernels.stage.cuda import HEADER, SEGMENTS, stage_source


def step_sources(vocab: int) -> dict[str, Source]:
    """By name, the kernels that bring a step's inputs in and take tokens from rows of ``vocab`` logits."""
    return {"stage": stage_source(), **sampler_sources(vocab), **edit_sources(vocab)}


def interface(vocab: int) -> str:
    """Digest of their parameters and constants, and of the sizes that the host takes for granted.

    An engine holds the one it was built with, and runs where it is the same. A kernel that means something
    else by the parameters it had is for ``engine.artifact.FORMAT_VERSION``.
    """
    sources = step_sources(vocab)
    agreed = (
        [(name, parameters(s), s.constants) for name, s in sources.items()],
        (HEADER, SEGMENTS, IN_PROMPT, LIST_ROOM, MOST_LOGPROBS, mask_words(vocab), COUNTER_BYTES, SWIZZLE),
        sorted(LOGITS_KINDS.items()),
        sorted(vars(SamplerBytes.of(vocab)).items()),
    )
    return hashlib.sha256(repr(agreed).encode()).hexdigest()[:16]


def parameters(source: Source) -> tuple[str, ...]:
    """The parameters of a kernel as its file declares them, in order; of Triton's with the types it has."""
    if isinstance(source, CudaSource):
        text = (KERNELS / source.file).read_text()
        declared = re.search(rf"__global__[^{{;]*?\b{source.function}\s*\(([^)]*)\)\s*\{{", text)
        assert declared, f"{source.file} has no kernel {source.function}"
        return tuple(" ".join(p.split()) for p in declared[1].split(","))
    file = KERNELS.parent.parent / Path(*source.module.split(".")).with_suffix(".py")
    functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    function = next(f for f in functions if f.name == source.function)
    types = dict(source.types)
    return tuple(f"{types.get(a.arg, 'constexpr')} {a.arg}" for a in function.args.args)
