"""How a decode step's attention is dealt out on GPUs, and that its CUDA C++ kernel compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pelton.builder.cubins import MAX_SHARED, compile_kernel
from pelton.kernels.gpu import nvrtc
from pelton.kernels.kv_write import cuda as kv_write
from pelton.kernels.launch import COUNTERS, CallSpec, OperandSpec
from pelton.kernels.rope_paged_attention import cuda, hopper
from pelton.kernels.tactic import NodeSpec, TensorSpec, all_tactics

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC (nvidia-cuda-nvrtc) is not here")


def call_of(
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    page: int = 16,
    dtype: str = "bfloat16",
    weights: str | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> CallSpec:
    row = (heads + 2 * kv_heads) * dim
    qkv = [OperandSpec(dtype=dtype, shape=("T", n, dim), strides=(row, dim, 1)) for n in (heads, kv_heads)]
    cache = OperandSpec(
        dtype=dtype, shape=("P", kv_heads, page, dim), strides=(kv_heads * page * dim, page * dim, dim, 1)
    )
    table = OperandSpec(dtype="int32", shape=("B", 64), strides=(64, 1))
    step = [OperandSpec(dtype="int32", shape=(n,), strides=(1,)) for n in ("B+1", "B")]
    slots = OperandSpec(dtype="int32", shape=("T",), strides=(1,))
    turns = OperandSpec(dtype="float32", shape=("T", dim), strides=(dim, 1))
    norm = OperandSpec(dtype=weights, shape=(dim,), strides=(1,)) if weights else None
    return CallSpec(
        inputs=(qkv[0], qkv[1], qkv[1], turns, cache, cache, slots, table, *step, norm, norm, None, None),
        outputs=(OperandSpec(dtype=dtype, shape=("T", heads, dim), strides=(heads * dim, dim, 1)),),
        attrs={"eps": 1e-6, "scale": dim**-0.5, "window": window, "softcap": softcap},
    )


def node_of(call: CallSpec) -> NodeSpec:
    inputs = tuple(None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape) for o in call.inputs)
    return NodeSpec(op="rope_paged_attention", inputs=inputs, attrs=call.attrs)


@pytest.mark.parametrize(("kv_heads", "expected"), [(8, [32, 32, 16, 8, 4, 2, 1]), (1, [32] * 5 + [16, 1])])
def test_few_sequences_are_shared_by_more_programs(kv_heads: int, expected: list[int]) -> None:
    """So many that they fill the GPU: the fewer KV heads the more."""
    assert [cuda.decode_tiles(largest, kv_heads, "bfloat16").splits for largest in cuda.LARGEST] == expected


def test_clusters_shrink_as_sequences_fill_the_gpu() -> None:
    assert [hopper.cluster(largest, 8).blocks for largest in (1, 2, 4, 8, 16)] == [8, 8, 4, 2, 2]


def test_a_step_of_more_sequences_and_heads_than_counters_has_a_tactic_without_any() -> None:
    node = node_of(call_of(heads=1024, kv_heads=1024))
    tactics = [t for t in all_tactics().values() if t.op == node.op and t.supports(node) and not t.sm]
    assert COUNTERS == 16 * 1024
    assert {t.largest_tokens for t in tactics} == {0, 1, 2, 4, 8, 16}


def test_parts_have_room_in_the_workspace() -> None:
    """Of the largest step of each tactic: sums, maxima and values of every program."""
    call = call_of()
    for name, tactic in all_tactics().items():
        if tactic.op != "rope_paged_attention" or tactic.sm or not tactic.decode or not tactic.largest_tokens:
            continue
        (launch,) = tactic.decode(call, tactic.largest_tokens)
        offsets = [a.offset for a in launch.arguments if a.kind == "workspace"]  # type: ignore[union-attr]
        splits = cuda.decode_tiles(tactic.largest_tokens, 8, "bfloat16").splits
        assert len(offsets) == (4 if splits > 1 else 0), name
        values = tactic.largest_tokens * 32 * splits * 4
        assert tactic.workspace(node_of(call), tactic.largest_tokens) >= values * (128 + 2)


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        (call_of(), True),
        (call_of(heads=40, kv_heads=2), False),
        (call_of(weights="bfloat16"), True),
        (call_of(weights="float32"), True),
        (call_of(weights="float16"), False),
    ],
    ids=["llama", "group of 20", "norms", "float32 norms", "other norms"],
)
def test_what_clusters_do_not_take_is_left_to_triton(call: CallSpec, fits: bool) -> None:
    tactic = all_tactics()["cuda.rope_paged_attention.hopper.4"]
    assert tactic.decode is not None
    (launch,) = tactic.decode(call, 4)
    assert (launch.kernel.function == "decode" and hasattr(launch.kernel, "file")) == fits  # type: ignore[union-attr]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_writes_and_attention_compile_with_and_without_scales(kv_dtype: str) -> None:
    """The interpreter takes what the compiler does not, such as None where a number may be."""
    call = call_of(heads=4, kv_heads=2, dim=64)
    scale = OperandSpec(dtype="float32", shape=(2,), strides=(1,)) if kv_dtype != "bfloat16" else None
    cache = replace(call.input(4), dtype=kv_dtype)
    call = replace(call, inputs=(*call.inputs[:4], cache, cache, *call.inputs[6:12], scale, scale))
    tactic = all_tactics()["cuda.rope_paged_attention.4"]
    assert tactic.launches is not None
    assert tactic.decode is not None
    write = replace(call, inputs=(*call.inputs[1:3], cache, cache, call.inputs[6], scale, scale), outputs=())
    works = *tactic.launches(call, 64), *tactic.decode(call, 4), *kv_write.launches(write, 4)
    for work in works:
        assert compile_kernel(work.kernel, 90).image[:4] == b"\x7fELF"  # type: ignore[union-attr]


@needs_nvrtc
@pytest.mark.parametrize(
    "call",
    [
        call_of(),
        call_of(heads=14, kv_heads=2, dim=64, page=8, dtype="float16", window=100),
        call_of(heads=16, kv_heads=1, weights="float32", softcap=30.0),
    ],
    ids=["llama", "window", "norms"],
)
@pytest.mark.parametrize("blocks", [1, 8])
def test_the_kernel_of_clusters_is_compiled(call: CallSpec, blocks: int) -> None:
    (launch,) = hopper.decode(call, hopper.Cluster(blocks, 3))
    cubin = compile_kernel(launch.kernel, 90)  # type: ignore[union-attr]
    assert cubin.image[:4] == b"\x7fELF"
    assert cubin.shared <= MAX_SHARED[90]
