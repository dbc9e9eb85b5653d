"""Kernels in CUDA C++: compiled here without a GPU, run by ``tests/gpu``."""

from __future__ import annotations

import pytest
from benchmarks import h200_kernels

from pelton.builder.cubins import compile_kernel
from pelton.builder.selection import CudaSelector
from pelton.builder.tactics import supporting
from pelton.engine.config import BuildConfig
from pelton.errors import BuildError
from pelton.kernels.gpu import nvrtc
from pelton.kernels.launch import Argument, CallSpec, KernelSource, LaunchSpec, OperandSpec, on_behalf
from pelton.kernels.paged_attention.hopper import attention
from pelton.kernels.sampling.cuda import sampler_sources
from pelton.kernels.stage.cuda import stage_source
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, all_tactics

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC (nvidia-cuda-nvrtc) is not here")


def operand(*shape: int | str, dtype: str) -> OperandSpec:
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= size if isinstance(size, int) else 1
    return OperandSpec(dtype=dtype, shape=shape, strides=tuple(reversed(strides)))


def attention_call(
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    dtype: str,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> CallSpec:
    q, cache = operand("T", heads, dim, dtype=dtype), operand("P", kv_heads, page, dim, dtype=dtype)
    indices = (operand("B", 64, dtype="int32"), operand("B+1", dtype="int32"), operand("B", dtype="int32"))
    attrs = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    sink = operand(heads, dtype="float32") if sinks else None
    return CallSpec(inputs=(q, cache, cache, *indices, None, None, sink), outputs=(q,), attrs=attrs)


@needs_nvrtc
@pytest.mark.parametrize(
    "call",
    [
        attention_call(32, 8, 128, 16, "bfloat16"),
        attention_call(14, 2, 64, 8, "float16", window=100),
        attention_call(8, 8, 128, 128, "bfloat16", softcap=30.0),
        attention_call(24, 8, 64, 16, "bfloat16", window=128, sinks=True),
    ],
    ids=["llama", "window", "softcap", "sinks"],
)
def test_attention_of_sm_90_is_compiled(call: CallSpec) -> None:
    launch = attention(call, 4096)
    assert isinstance(launch, LaunchSpec)
    cubin = compile_kernel(launch.kernel, 90)
    assert cubin.image[:4] == b"\x7fELF"
    assert cubin.threads == 384
    assert cubin.scratch == 0


@needs_nvrtc
def test_an_error_of_the_compiler_names_the_file_and_the_line() -> None:
    launch = attention(attention_call(32, 8, 96, 16, "bfloat16"), 64)
    with pytest.raises(BuildError, match=r"hopper_attention\.cu.*sm_90a.*error"):
        compile_kernel(launch.kernel, 90)


def test_a_map_of_an_operand_follows_it_to_the_results_of_a_larger_call() -> None:
    launch = attention(attention_call(32, 8, 128, 16, "bfloat16"), 4096)
    inputs = [Argument("output"), *(Argument("input", index=4 + i) for i in range(5))]
    (work,) = on_behalf((launch,), inputs, [Argument("output")])
    q, k_cache, _, table, *_ = work.arguments
    assert (q.kind, q.of, q.index) == ("tensor_map", "output", 0)
    assert (k_cache.kind, k_cache.of, k_cache.index) == ("tensor_map", "input", 4)
    assert (table.kind, table.index) == ("input", 6)


@needs_nvrtc
@pytest.mark.parametrize("sm", [80, 89, 90])
def test_what_every_engine_carries_is_compiled_for_every_architecture(sm: int) -> None:
    for source in (stage_source(), *sampler_sources(262208).values()):
        assert compile_kernel(source, sm).name == source.function


def test_what_the_sweep_of_kernels_times_can_be_described() -> None:
    variants = [*h200_kernels.prefill_variants(), *h200_kernels.attention_variants()]
    variants += h200_kernels.linear_variants({"gemv", "stream"})
    assert len({v.what for v in variants}) > 10


def test_only_targets_of_its_architecture_are_offered_a_tactic_of_one() -> None:
    for target, offered in (("sm_90", True), ("sm_80", False), ("sm_100", False)):
        tactics = CudaSelector(BuildConfig(target=target), None).tactics
        assert ("cuda.paged_attention.hopper" in tactics) == offered


def product_call(
    op: str, tokens: int, n: int, k: int, dtype: str, *, bias: bool = False, x_row: int = 0
) -> tuple[CallSpec, Tactic]:
    x = OperandSpec(dtype=dtype, shape=("T", k), strides=(x_row or k, 1))
    gated = op.endswith("gated")
    out = operand("T", n, dtype=dtype)
    inputs = [
        x,
        operand(2 * n if gated else n, k, dtype=dtype),
        operand(n, dtype="float32") if bias else None,
    ]
    if op.startswith("norm"):
        inputs.append(operand(k, dtype="float32"))
    if op == "linear_add":
        inputs.append(out)
    attrs = {"eps": 1e-5, "kind": "gelu_tanh"} if gated else {"eps": 1e-5}
    return CallSpec(inputs=tuple(inputs), outputs=(out,), attrs=attrs), all_tactics()[
        f"cuda.{op}.hopper{tokens}"
    ]


@needs_nvrtc
@pytest.mark.parametrize("op", ["linear", "linear_add", "norm_linear", "norm_linear_gated"])
@pytest.mark.parametrize("tokens", [8, 16])
def test_a_product_of_sm_90_is_one_kernel_its_norm_included(op: str, tokens: int) -> None:
    half = tokens == 8 and not op.startswith("norm")
    call, tactic = product_call(op, tokens, 96, 200, "float16" if half else "bfloat16", bias=op == "linear")
    assert tactic.launches is not None
    (product,) = tactic.launches(call, tokens)
    assert isinstance(product, LaunchSpec)
    cubin = compile_kernel(product.kernel, 90)
    assert cubin.image[:4] == b"\x7fELF"
    # No two blocks fit into the 228 KiB of a multiprocessor, of which each takes one more.
    assert 2 * (cubin.shared + 1024) > 228 << 10


def test_rows_that_tensor_copies_cannot_reach_are_left_to_triton() -> None:
    call, tactic = product_call("linear", 8, 96, 200, "bfloat16", x_row=204)
    assert tactic.launches is not None
    (work,) = tactic.launches(call, 8)
    assert isinstance(work, LaunchSpec)
    assert isinstance(work.kernel, KernelSource)


def test_few_tokens_of_16_bits_are_taken_by_the_kernel_of_sm_90() -> None:
    call, _ = product_call("norm_linear_gated", 8, 96, 200, "bfloat16")
    node = NodeSpec(
        op="norm_linear_gated",
        inputs=tuple(None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape) for o in call.inputs),
        attrs=call.attrs,
    )
    for sm, names in (
        (90, ("hopper8", "hopper8", "hopper16", "hopper_tiles32", "hopper_tiles512", "hopper_tiles640")),
        (80, ("gemv", "stream16", "stream16", "cublaslt", "cublaslt", "cublaslt")),
    ):
        known = {n: t for n, t in all_tactics().items() if t.device == "cuda" and t.sm in (0, sm)}
        found = supporting(node, known)
        chosen = [next(t.name for t in found if t.takes(tokens)) for tokens in (1, 8, 16, 17, 300, 513)]
        assert chosen == [f"cuda.norm_linear_gated.{name}" for name in names]
