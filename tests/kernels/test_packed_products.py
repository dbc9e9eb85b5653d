"""Products with packed weights: codes multiplied as defined, sources that compile, work for every program."""

from __future__ import annotations

import ctypes as C
import re

import pytest

from pelton.dtypes import GPU_BLOCK_TYPES
from pelton.kernels.gpu import nvrtc
from pelton.kernels.gpu_types import GPU_TYPES
from pelton.kernels.launch import CallSpec, CudaSource, LaunchSpec, OperandSpec, Work
from pelton.kernels.linear.packed_few import FEW_STEPS, FewTiles, clusters_and_stages, few, few_tiles
from pelton.kernels.linear.packed_tiles import PACKED_STEPS, packed_tiles
from pelton.kernels.linear.packed_wide import WIDE_STEPS, wide, wide_tiles
from pelton.kernels.linear.products import Form
from pelton.kernels.rope_paged_attention import hopper

pytest.importorskip("triton")


def call(quant: str, n: int, k: int, *, norm: bool = False, gated: bool = False) -> CallSpec:
    x = OperandSpec(dtype="bfloat16", shape=("T", k), strides=(k, 1))
    weight = OperandSpec(dtype="uint8", shape=(n, k), strides=(k, 1), quant=quant)
    gains = OperandSpec(dtype="float32", shape=(k,), strides=(1,))
    out = OperandSpec(dtype="bfloat16", shape=("T", n // 2 if gated else n), strides=(n, 1))
    inputs = (x, weight, None, gains) if norm else (x, weight, None)
    return CallSpec(inputs=inputs, outputs=(out,), attrs={"kind": "silu", "eps": 1e-5})


@pytest.mark.parametrize(
    "quant",
    ["int4_g128", "int4_g32", "int8_g64", "int8_row", "fp8_row", "fp8_g128", "fp4_g64", "q4_k", "q6_k"],
)
def test_sources_for_sm_90_compile(quant: str) -> None:
    if not nvrtc.available():
        pytest.skip("NVRTC is not here")
    gated = Form(gated=True, norm=3)
    works: list[Work] = [
        few(
            gated,
            call(quant, 512, 256, norm=True, gated=True),
            FewTiles(tokens=8, splits=2, parts=2, batch=1, cluster=1),
        )
    ]
    tiles = FewTiles(tokens=16, splits=1, parts=2, batch=2, cluster=2)
    works.append(few(Form(), call(quant, 256, 256), tiles))
    for work in works:
        assert isinstance(work, LaunchSpec)
        source = work.kernel
        assert isinstance(source, CudaSource)
        image = nvrtc.compile_file(source.file, "sm_90a", source.constants)
        assert image[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    "quant", ["int4_g128", "int8_g64", "int8_row", "fp8_g128", "nf4_g64", "nvfp4", "mxfp4", "q4_k", "q6_k"]
)
def test_asynchronous_products_of_many_tokens_stay_so(quant: str) -> None:
    """The assembler waits for each where registers are written to that it cannot prove to have been read."""
    if not nvrtc.available():
        pytest.skip("NVRTC is not here")
    narrow = [(n, tokens, False) for n, tokens in ((4096, 64), (4096, 256), (6144, 128), (6144, 256))]
    for n, tokens, gated in (*narrow, (14336, 128, True)):
        of_call = call(quant, 2 * n if gated else n, 4096, gated=gated)
        (work,) = wide(Form(gated=gated), of_call, wide_tiles(n, tokens, gated, quant), tokens)
        assert isinstance(work, LaunchSpec)
        assert isinstance(work.kernel, CudaSource)
        assert "serialized" not in compiler_log(work.kernel)


@pytest.mark.parametrize("quant", sorted(GPU_TYPES))
def test_a_weight_is_decoded_once_for_256_tokens(quant: str) -> None:
    """Where shared memory is too small for all tokens' tile, two tiles decode every weight twice."""
    for n, gated in ((4096, False), (6144, False), (14336, True)):
        assert wide_tiles(n, 256, gated, quant).tokens == 256


def compiler_log(source: CudaSource) -> str:
    lib, program = nvrtc.library(), C.c_void_p()
    text = (nvrtc.KERNELS / source.file).read_bytes()
    assert not lib.nvrtcCreateProgram(C.byref(program), text, b"x.cu", 0, None, None)
    macros = [f"-D{name}={value}" for name, value in source.constants]
    folders = [f"-I{nvrtc.KERNELS / folder}" for folder in ("gpu", "linear")]
    options = [o.encode() for o in ("-arch=sm_90a", "--ptxas-options=-v", *nvrtc.FLAGS, *folders, *macros)]
    assert not lib.nvrtcCompileProgram(program, len(options), (C.c_char_p * len(options))(*options))
    size = C.c_size_t()
    lib.nvrtcGetProgramLogSize(program, C.byref(size))
    log = C.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    lib.nvrtcDestroyProgram(C.byref(program))
    return log.value.decode()


@pytest.mark.parametrize("quant", GPU_BLOCK_TYPES)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (40, 256), (4096, 4096), (128256, 4096)])
def test_every_program_has_work(quant: str, n: int, k: int) -> None:
    """Programs that share a tile count each other: one without work would never be counted."""
    for tokens in (1, *PACKED_STEPS, 1000):
        for gated in (False, True):
            found = [packed_tiles(n, k, tokens, gated, size, quant) for size in (2, 4)]
            for tiles in found:
                steps = -(-n // (16 * tiles.panels)) * -(-k // (tiles.unit * tiles.units))
                assert 1 <= tiles.programs <= steps


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("quant", ["int4_g128", "int8_g32", "fp4_g64", "q6_k"])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (576, 1536), (2304, 9216), (14336, 4096), (8192, 28672)])
def test_every_block_of_few_tokens_has_work_and_room(n: int, k: int, quant: str, gated: bool) -> None:
    form = Form(gated=gated, norm=3)
    for tokens in FEW_STEPS:
        tiles = few_tiles(form, n, k, tokens, quant)
        if tiles is None:  # x, and sums of many panels, leave no room
            assert k * tokens > 100_000
            continue
        clusters, stages = clusters_and_stages(form, n, k, quant, tiles)
        assert stages >= 1
        assert 1 <= clusters <= n // 16
        assert clusters * tiles.cluster <= 132
        assert 32 * (tiles.splits * tiles.parts + 1) <= 1024
        assert k // 128 % tiles.cluster == 0


def test_a_product_of_one_token_leaves_the_attention_behind_it_room() -> None:
    """Beside it in a multiprocessor of 228 KiB, of which a block takes one more, and of 65536 registers."""
    tiles = few_tiles(Form(norm=3), 6144, 4096, 1, "int4_g128")
    assert tiles is not None
    how = hopper.cluster(1, 8, 4, 128)
    assert tiles.shared + hopper.shared_bytes(how, 4, 128) + (2 << 10) <= 228 << 10
    if not nvrtc.available():
        pytest.skip("NVRTC is not here")
    work = few(Form(norm=3), call("int4_g128", 6144, 4096, norm=True), tiles)
    assert isinstance(work.kernel, CudaSource)
    (registers,) = map(int, re.findall(r"Used (\d+) registers", compiler_log(work.kernel)))
    of_attention = 32 * (how.warps + 1) * 128
    assert work.kernel.threads * -(-registers // 8) * 8 + of_attention <= 65536


@pytest.mark.parametrize(
    ("n", "k"), [(16, 128), (48, 256), (4096, 4096), (6144, 4096), (14336, 4096), (128256, 4096)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_wide_tiles_are_forms_that_the_kernel_has(n: int, k: int, gated: bool) -> None:
    for tokens in (17, *WIDE_STEPS):
        tiles = wide_tiles(n, tokens, gated, "int4_g128")
        a_round = 4 * tiles.row_groups // (2 if gated else 1)
        assert tiles.tokens % tiles.cluster == 0
        assert tiles.each <= a_round or (tiles.cluster == 1 and tiles.splits == 1)
        (work,) = wide(
            Form(gated=gated), call("int4_g128", (2 if gated else 1) * n, k, gated=gated), tiles, tokens
        )
        assert isinstance(work, LaunchSpec)
        assert isinstance(work.kernel, CudaSource)
        assert dict(work.kernel.constants)["STAGES"] // 2 > tiles.splits
        assert work.kernel.shared <= 227 << 10
        blocks = work.grid[0][0].value({}) // tiles.cluster
        each = 16 * tiles.each
        if tiles.half_strip:  # pairs of blocks
            blocks, each = blocks // 2, 2 * each + (32 if gated else 64)
        assert (blocks - 1) * each < n <= blocks * each
