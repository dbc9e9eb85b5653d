"""How a decode step's attention is dealt out on GPUs, and that its CUDA C++ kernel compiles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pelton.builder.cubins import MAX_SHARED, compile_kernel
from pelton.dtypes import KV_CODES
from pelton.kernels.gpu import nvrtc
from pelton.kernels.kv_write import cuda as kv_write
from pelton.kernels.launch import COUNTER_BYTES, COUNTERS, CallSpec, LaunchSpec, OperandSpec
from pelton.kernels.linear import hopper as linear
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
        inputs=(qkv[0], qkv[1], qkv[1], turns, cache, cache, slots, table, *step, norm, norm, *(None,) * 5),
        outputs=(OperandSpec(dtype=dtype, shape=("T", heads, dim), strides=(heads * dim, dim, 1)),),
        attrs={"eps": 1e-6, "scale": dim**-0.5, "window": window, "softcap": softcap},
    )


def with_caches(call: CallSpec, kv_dtype: str, *, shifted: bool = False) -> CallSpec:
    """``call`` with caches of another type, and their scales; ``shifted``: with keys less a vector."""
    cache = replace(call.input(4), dtype=kv_dtype)
    scale = OperandSpec(dtype="float32", shape=cache.shape[1:2], strides=(1,))
    scales = (scale, scale) if kv_dtype in KV_CODES else (None, None)
    heads, dim = int(cache.shape[1]), int(cache.shape[3])
    wide = (OperandSpec(dtype="float32", shape=(heads, n * dim), strides=(n * dim, 1)) for n in (1, 2))
    rounding = tuple(wide) if shifted else (None, None)
    inputs = *call.inputs[:4], cache, cache, *call.inputs[6:12], *scales, *rounding, call.inputs[16]
    return replace(call, inputs=inputs)


def with_sinks(call: CallSpec) -> CallSpec:
    sinks = OperandSpec(dtype="float32", shape=call.input(0).shape[1:2], strides=(1,))
    return replace(call, inputs=(*call.inputs[:16], sinks))


def node_of(call: CallSpec) -> NodeSpec:
    inputs = tuple(None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape) for o in call.inputs)
    return NodeSpec(op="rope_paged_attention", inputs=inputs, attrs=call.attrs)


@pytest.mark.parametrize(("kv_heads", "expected"), [(8, [32, 32, 16, 8, 4, 2, 1]), (1, [32] * 5 + [16, 1])])
def test_few_sequences_are_shared_by_more_programs(kv_heads: int, expected: list[int]) -> None:
    """So many that they fill the GPU: the fewer KV heads the more."""
    assert [cuda.decode_tiles(largest, kv_heads, "bfloat16").splits for largest in cuda.LARGEST] == expected


def test_clusters_shrink_as_sequences_fill_the_gpu() -> None:
    assert [hopper.cluster(largest, 8, 4, 128).blocks for largest in (1, 2, 4, 8, 16)] == [8, 8, 4, 2, 2]


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


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("largest", cuda.LARGEST)
def test_caches_of_8_bits_have_the_same_kernel_in_steps_of_any_size(
    kv_dtype: str, largest: int, shifted: bool
) -> None:
    call = with_caches(call_of(), kv_dtype, shifted=shifted)
    tactic = all_tactics()[f"cuda.rope_paged_attention.hopper8.{largest or 'any'}"]
    assert tactic.supports(node_of(call))
    assert not tactic.supports(node_of(call_of()))
    assert not tactic.supports(node_of(with_caches(call_of(dim=80), kv_dtype)))
    assert tactic.decode is not None
    (launch,) = tactic.decode(call, largest or 256)
    assert launch.kernel.file == hopper.FILE  # type: ignore[union-attr]


def test_keys_less_a_vector_are_left_to_triton_where_a_cache_holds_elements() -> None:
    call = with_caches(call_of(), "bfloat16", shifted=True)
    tactic = all_tactics()["cuda.rope_paged_attention.hopper.4"]
    assert tactic.decode is not None
    (launch,) = tactic.decode(call, 4)
    assert not hasattr(launch.kernel, "file")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kv_dtype", "shifted", "sinks"),
    [
        ("bfloat16", False, False),
        ("int8", False, False),
        ("float8_e4m3fn", False, False),
        ("float8_e4m3fn", True, False),
        ("bfloat16", False, True),
    ],
)
def test_writes_and_attention_compile_with_and_without_scales(
    kv_dtype: str, shifted: bool, sinks: bool
) -> None:
    """The interpreter takes what the compiler does not, such as None where a number may be."""
    call = call_of(heads=4, kv_heads=2, dim=64)
    call = with_caches(with_sinks(call) if sinks else call, kv_dtype, shifted=shifted)
    cache, scale = call.input(4), call.inputs[12]
    tactic = all_tactics()["cuda.rope_paged_attention.4"]
    assert tactic.launches is not None
    assert tactic.decode is not None
    given = *call.inputs[1:3], cache, cache, call.inputs[6], scale, scale, *call.inputs[14:]
    write = replace(call, inputs=given, outputs=())
    in_any_step = tactic.launches(call, 64)[: 1 if shifted else None]  # attention has no word of it
    works = *in_any_step, *tactic.decode(call, 4), *kv_write.launches(write, 4)
    for work in works:
        assert compile_kernel(work.kernel, 90).image[:4] == b"\x7fELF"  # type: ignore[union-attr]


@needs_nvrtc
@pytest.mark.parametrize(
    "call",
    [
        call_of(),
        call_of(heads=14, kv_heads=2, dim=64, page=8, dtype="float16", window=100),
        call_of(heads=16, kv_heads=1, weights="float32", softcap=30.0),
        with_caches(call_of(), "int8"),
        with_caches(with_sinks(call_of(heads=9, kv_heads=1, dim=64, dtype="float16")), "float8_e4m3fn"),
        with_caches(call_of(), "float8_e4m3fn", shifted=True),
        with_caches(call_of(heads=9, kv_heads=1, dim=64, dtype="float16"), "int8", shifted=True),
    ],
    ids=["llama", "window", "norms", "int8", "fp8 and sinks", "shifted", "shifted, 64"],
)
@pytest.mark.parametrize("blocks", [1, 8])
def test_the_kernel_of_clusters_is_compiled(call: CallSpec, blocks: int) -> None:
    (launch,) = hopper.decode(call, hopper.Cluster(blocks, 3))
    cubin = compile_kernel(launch.kernel, 90)  # type: ignore[union-attr]
    assert cubin.image[:4] == b"\x7fELF"
    assert cubin.shared <= MAX_SHARED[90]


@pytest.mark.parametrize("largest", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 128])
def test_clusters_have_room_beside_the_product_before(largest: int, dim: int) -> None:
    """Of 228 KiB of a multiprocessor, 1 KiB of each block is the driver's."""
    for kv_heads, group in itertools.product((1, 2, 4, 8, 16, 32), range(1, 17)):
        how = hopper.cluster(largest, kv_heads, group, dim)
        assert hopper.shared_bytes(how, group, dim) + linear.SHARED + (2 << 10) <= 228 << 10


def test_the_rotated_q_of_a_result_in_codes_is_behind_what_attention_keeps() -> None:
    tokens, plain = 100, call_of()
    left = replace(plain.outputs[0], dtype="float8_e4m3fn")
    call = replace(plain, outputs=(left,), attrs={**plain.attrs, "y_scale": 0.1, "y_codes": "fp8"})
    node, found = node_of(call), set()
    for tactic in all_tactics().values():
        if tactic.op != "rope_paged_attention" or tactic.device != "cuda" or not tactic.supports(node):
            continue
        assert tactic.launches is not None
        write, attend = tactic.launches(call, tokens)
        assert isinstance(write, LaunchSpec) and isinstance(attend, LaunchSpec)
        (q,) = (a for a in write.arguments if a.kind == "workspace")
        kept = [a for a in attend.arguments if a.kind == "workspace" or a.of == "workspace"]
        assert q.offset in [a.offset for a in kept]
        for part in (hopper.HOPPER, hopper.INVARIANT, cuda.ATTENTION):
            if part.name.split(".", 2)[2:] == tactic.name.split(".", 2)[2:]:
                assert q.offset >= COUNTER_BYTES + part.workspace(cuda.attention_of(part, node), tokens)
                found.add(part.name)
        assert q.offset + tokens * 32 * 128 * 2 <= COUNTER_BYTES + tactic.workspace(node, tokens)
        assert [a for a in attend.arguments if a.kind == "output"], "and the codes are the result"
    assert hopper.INVARIANT.name in found
