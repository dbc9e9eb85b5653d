"""The kernels of ``triton_sample.py`` that every engine for a GPU carries besides its plan's."""

from __future__ import annotations

from pelton.kernels.launch import KernelSource

MODULE = "pelton.kernels.sampling.triton_sample"
RESOLVE_BLOCK = 256


def sampler_source(vocab: int) -> KernelSource:
    """``sample`` for rows of ``vocab`` logits: a program a row."""
    floats = [(name, "*fp32") for name in ("top_p", "min_p", "uniform")]
    types = [("logits", "*fp32"), ("temperature", "*fp32"), ("top_k", "*i32"), *floats, ("tokens", "*i32")]
    return KernelSource(
        module=MODULE,
        function="sample",
        types=tuple(types),
        constants=(("V", vocab), ("BLOCK", 4096)),
        num_warps=8,
    )


def resolve_source() -> KernelSource:
    """``resolve``: ``RESOLVE_BLOCK`` ids a program."""
    return KernelSource(
        module=MODULE,
        function="resolve",
        types=(("ids", "*i32"), ("sampled", "*i32"), ("n", "i32")),
        constants=(("BLOCK", RESOLVE_BLOCK),),
    )
