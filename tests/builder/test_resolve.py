"""What a ``BuildConfig`` resolves to, what is said of it, and what is refused."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from pelton.builder.resolve import CheckpointFacts, resolve
from pelton.builder.target import KNOWN_SM
from pelton.engine.config import BuildConfig
from pelton.engine.resources import cores
from pelton.engine.shapes import OptimizationProfile
from pelton.errors import ConfigError
from pelton.kernels import native
from pelton.kernels.gpu import nvrtc


@pytest.fixture(autouse=True)
def _an_avx2_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "cpu_level", lambda: "avx2")


def facts(limit: int = 2048, **elements: int) -> CheckpointFacts:
    return CheckpointFacts(max_position_embeddings=limit, matrix_elements=elements or {"bfloat16": 1000})


def resolved(config: BuildConfig, known: CheckpointFacts) -> tuple[dict[str, Any], str]:
    result, notes = resolve(config, known)
    values = {name: getattr(result, name) for name in result.__struct_fields__}
    assert None not in values.values()
    return values, "\n".join(notes)


def test_defaults_of_a_bfloat16_checkpoint() -> None:
    values, notes = resolved(BuildConfig(), facts())
    assert values == {
        "max_batch_size": 8,
        "max_seq_len": 2048,
        "max_num_tokens": 512,
        "max_input_len": 2047,
        "block_size": 16,
        "dtype": "bfloat16",
        "activations": "float32",
        "kv_dtype": "float16",
        "deterministic": False,
        "accumulate": "float32",
        "gpu_memory_fraction": 0.9,
        "threads": 0,
        "fast_build": False,
        "quant": "none",
        "profiles": (OptimizationProfile.parse("T=1:8:512,B=1:8:8,N=1:8:512"),),
        "opt_num_tokens": 8,
        "timing": True,
        "plugins": {},
        "target": "cpu",
        "cpu_level": "avx2",
        "model_impl": "auto",
        "profiling": "names",
        "passes": {},
    }
    assert notes == ""


@pytest.mark.parametrize(
    ("config", "known", "expected", "note"),
    [
        ({}, facts(131072), {"max_seq_len": 8192}, "8192 of the model's 131072 tokens"),
        ({"max_seq_len": 16384}, facts(131072), {"max_seq_len": 16384, "max_input_len": 16383}, ""),
        ({}, facts(float32=9), {"dtype": "float32", "kv_dtype": "float32"}, ""),
        ({}, facts(float16=9), {"dtype": "float16", "kv_dtype": "float16"}, ""),
        ({"dtype": "float32"}, facts(float16=9), {"dtype": "float32", "kv_dtype": "float32"}, ""),
        ({"dtype": "float16"}, facts(bfloat16=9), {"dtype": "float16"}, "rounded to float16"),
        ({"dtype": "bfloat16"}, facts(float16=9), {"kv_dtype": "float16"}, "rounded to bfloat16"),
        ({"dtype": "bfloat16"}, facts(float32=9), {"dtype": "bfloat16"}, "float32 weights are rounded"),
        ({}, facts(q4_1=9), {"activations": "int8", "dtype": "float32", "kv_dtype": "float16"}, "int8"),
        ({}, facts(q4_1=9, bfloat16=3), {"activations": "int8", "dtype": "bfloat16"}, "int8"),
        ({"activations": "float32"}, facts(q4_1=9), {"kv_dtype": "float32"}, ""),
        ({"activations": "int8"}, facts(), {"activations": "float32"}, "there are none"),
        ({"kv_dtype": "bfloat16"}, facts(float32=9), {"kv_dtype": "bfloat16"}, ""),
        ({"max_batch_size": 600}, facts(), {"max_num_tokens": 600}, "max_num_tokens is 600"),
        ({"max_seq_len": 20, "max_batch_size": 2}, facts(), {"max_num_tokens": 40}, ""),
        ({"max_seq_len": 2, "max_batch_size": 1}, facts(), {"max_num_tokens": 2, "max_input_len": 1}, ""),
        ({"cpu_level": "any"}, facts(), {"timing": True}, ""),
        ({"timing": False}, facts(), {"timing": False}, ""),
        ({"cpu_level": "avx512"}, facts(), {"timing": False}, "cannot be measured on this avx2 CPU"),
        ({"threads": cores()}, facts(), {"threads": cores()}, ""),
        ({"threads": cores() + 1}, facts(), {"threads": cores() + 1}, "run slower"),
    ],
)
def test_automatic_choices_and_what_is_said(
    config: dict[str, Any], known: CheckpointFacts, expected: dict[str, Any], note: str
) -> None:
    values, notes = resolved(BuildConfig(**config), known)
    assert {name: values[name] for name in expected} == expected
    assert note in notes
    assert note or not notes or "activations" in notes


def test_sums_in_float16_are_said_to_gain_nothing_where_they_do_not() -> None:
    half = {"accumulate": "float16", "dtype": "float16"}
    for target, gains in (("sm_80", False), ("sm_86", True), ("sm_89", True), ("sm_90", False)):
        values, notes = resolved(BuildConfig(target=target, **half), facts(float16=9))
        assert values["accumulate"] == "float16"
        assert (f"accumulate float16 gains nothing on {target}" in notes) != gains


def test_sums_in_float16_are_not_of_products_of_codes() -> None:
    config = BuildConfig(target="sm_90", accumulate="float16", dtype="float16", activations="int8")
    with pytest.raises(ConfigError, match=r"contradicts activations int8.* leave one of them out"):
        resolve(config, facts(int8_row=9))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_seq_len": 4096}, "max_seq_len 4096 is beyond the model's 2048 positions"),
        ({"max_seq_len": 1}, "max_seq_len 1 leaves no room"),
        ({"max_seq_len": 0}, "max_seq_len must be a whole number of at least 1, not 0"),
        ({"max_batch_size": -3}, "max_batch_size must be a whole number of at least 1, not -3"),
        ({"max_batch_size": True}, "max_batch_size must be a whole number"),
        (
            {"max_batch_size": 3 << 30},
            "max_batch_size 3221225472 is beyond 1048576, the largest step; use less",
        ),
        ({"max_num_tokens": 1 << 21}, "max_num_tokens 2097152 is beyond 1048576, the largest step"),
        ({"max_input_len": 2048}, "max_input_len 2048 leaves no room .* use max_input_len 2047 or less"),
        ({"accumulate": "bfloat16"}, "unknown accumulate 'bfloat16'"),
        ({"accumulate": "float16"}, "accumulate float16 is for GPU engines; leave it out, or set target"),
        (
            {"accumulate": "float16", "target": "sm_89"},
            r"is for networks in float16, and this one computes in bfloat16.* set dtype float16",
        ),
        (
            {"accumulate": "float16", "target": "sm_89", "dtype": "float16", "deterministic": True},
            "accumulate float16 contradicts deterministic.* leave one of them out",
        ),
        (
            {
                "accumulate": "float16",
                "target": "sm_89",
                "dtype": "float16",
                "max_num_tokens": 128,
                "max_batch_size": 8,
            },
            "for steps of more than 128 tokens, and max_num_tokens is 128",
        ),
        ({"max_num_tokens": 4}, "max_num_tokens 4 is below max_batch_size 8"),
        ({"max_num_tokens": 9}, "max_num_tokens 9 is below block_size 16"),
        ({"block_size": 12}, r"unknown block_size 12.*known: 8, 16, 32, 64, 128"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'; did you mean bfloat16"),
        ({"dtype": "q4_0"}, "unknown dtype 'q4_0'"),
        ({"activations": "int4"}, "unknown activations 'int4'; did you mean int8"),
        ({"kv_dtype": "int4"}, "unknown kv_dtype 'int4'"),
        ({"threads": -1}, "threads must be 0"),
        ({"fast_build": True, "timing": True}, "timing contradicts fast_build"),
        ({"profiling": "full"}, "unknown profiling 'full'"),
        ({"cpu_level": "avx-512"}, "unknown cpu_level 'avx-512'; did you mean avx512"),
        (
            {"cpu_level": "avx512", "timing": True},
            "timing cannot be done for cpu_level avx512 on this avx2 CPU",
        ),
    ],
)
def test_contradictions_are_refused_with_the_way_out(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(BuildConfig(**config), facts())


def test_passes_are_kept_in_their_order_without_the_automatic_ones() -> None:
    config, _ = resolve(
        BuildConfig(passes={"dead_code": "off", "add_rms_norm": "auto", "fuse_qkv": "force"}), facts()
    )
    assert list(config.passes.items()) == [("fuse_qkv", "force"), ("dead_code", "off")]


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ({"fuse_qvk": "off"}, "unknown pass 'fuse_qvk'; did you mean fuse_qkv?"),
        ({"fuse_qkv": "of"}, "unknown mode of the pass fuse_qkv 'of'; did you mean off?"),
    ],
)
def test_unknown_passes_and_modes_are_refused(passes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(BuildConfig(passes=passes), facts())


def test_a_gpu_target_computes_in_the_type_of_its_weights() -> None:
    config, _ = resolve(BuildConfig(target="sm_90"), facts(bfloat16=1000))
    assert (config.dtype, config.activations, config.kv_dtype) == ("bfloat16",) * 3
    assert (config.max_batch_size, config.max_num_tokens) == (256, 4096)


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90"])
@pytest.mark.parametrize(
    "stored", [{"q4_1": 9}, {"q4_1": 9, "float32": 3}, {"q8_0": 9, "bfloat16": 3}, {"float32": 9}]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype_that_is_asked_for_is_taken(target: str, stored: dict[str, int], dtype: str) -> None:
    config, _ = resolve(BuildConfig(target=target, dtype=dtype), facts(**stored))
    assert config.dtype == dtype


def test_block_quantised_weights_alone_are_computed_in_bfloat16_on_gpus() -> None:
    for stored in ({"q4_1": 9}, {"q4_1": 9, "float32": 3}):
        assert resolve(BuildConfig(target="sm_90"), facts(**stored))[0].dtype == "bfloat16"


def test_a_gpu_is_not_found_by_a_made_up_name() -> None:
    with pytest.raises(ConfigError, match="unknown target 'gpu'"):
        resolve(BuildConfig(target="gpu"), facts(bfloat16=1000))
    with pytest.raises(ConfigError, match="too old"):
        resolve(BuildConfig(target="sm_70"), facts(bfloat16=1000))


def test_settings_of_cpu_engines_are_refused_for_a_gpu() -> None:
    with pytest.raises(ConfigError, match="activations 'int8' does not fit this build"):
        resolve(BuildConfig(target="sm_90", activations="int8"), facts(q4_1=1000))
    with pytest.raises(ConfigError, match="cpu_level is for CPU engines"):
        resolve(BuildConfig(target="sm_90", cpu_level="avx2"), facts(bfloat16=1000))


def test_caches_of_8_bits_on_gpus() -> None:
    config, _ = resolve(BuildConfig(target="sm_90", kv_dtype="fp8"), facts(bfloat16=1000))
    assert config.kv_dtype == "float8_e4m3fn"
    config, _ = resolve(BuildConfig(target="sm_80", kv_dtype="int8"), facts(bfloat16=1000))
    assert config.kv_dtype == "int8"
    with pytest.raises(ConfigError, match=r"needs a GPU that converts fp8.*target is sm_80.*use int8"):
        resolve(BuildConfig(target="sm_80", kv_dtype="fp8"), facts(bfloat16=1000))


def test_inputs_of_products_are_quantised_on_gpus_as_the_checkpoint_or_the_user_says() -> None:
    fp8 = CheckpointFacts(
        max_position_embeddings=2048,
        matrix_elements={"fp8_row": 1000, "bfloat16": 10},
        quantised_inputs=frozenset({"fp8"}),
    )
    config, notes = resolve(BuildConfig(target="sm_90"), fp8)
    assert (config.dtype, config.activations, config.kv_dtype) == ("bfloat16", "fp8", "bfloat16")
    assert "quantise the inputs of products to fp8" in "\n".join(notes)
    config, _ = resolve(BuildConfig(target="sm_80"), fp8)
    assert config.activations == "bfloat16"
    with pytest.raises(ConfigError, match=r"'fp8' does not fit this build \(known: bfloat16\)"):
        resolve(BuildConfig(target="sm_80", activations="fp8"), fp8)
    config, _ = resolve(BuildConfig(target="sm_90", activations="bfloat16"), fp8)
    assert config.activations == "bfloat16"
    with pytest.raises(ConfigError, match=r"'int8' does not fit this build \(known: bfloat16, fp8\)"):
        resolve(BuildConfig(target="sm_90", activations="int8"), fp8)
    config, _ = resolve(BuildConfig(target="sm_90", activations="int8"), facts(int8_row=1000, bfloat16=10))
    assert config.activations == "int8"


def test_a_checkpoint_with_two_kinds_of_quantised_inputs_keeps_them_whole() -> None:
    mixed = CheckpointFacts(
        max_position_embeddings=2048,
        matrix_elements={"fp8_row": 10, "int8_row": 10, "bfloat16": 10},
        quantised_inputs=frozenset({"fp8", "int8"}),
    )
    config, notes = resolve(BuildConfig(target="sm_90"), mixed)
    assert config.activations == "bfloat16"
    assert "fp8 and int8" in "\n".join(notes)


def test_products_of_codes_are_for_one_architecture() -> None:
    fp8 = CheckpointFacts(
        max_position_embeddings=2048,
        matrix_elements={"fp8_row": 1000, "bfloat16": 10},
        quantised_inputs=frozenset({"fp8"}),
    )
    config, notes = resolve(BuildConfig(target="sm_80"), fp8)
    assert config.activations == "bfloat16"
    assert "inputs of products stay bfloat16" in "\n".join(notes)
    with pytest.raises(ConfigError, match="on sm_90"):
        resolve(BuildConfig(target="sm_80", activations="fp8"), fp8)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sm_999", r"unknown target 'sm_999'; did you mean sm_90\? \(known: cpu, cuda, sm_80, sm_86, "),
        ("sm_090", "did you mean sm_90?"),
        ("sm_90a", "did you mean sm_90?"),
        ("SM_90", "did you mean sm_90?"),
        ("cuda:3", "unknown target 'cuda:3'; did you mean cuda?"),
        ("sm_81", "unknown target 'sm_81'"),
        ("sm_75", "target sm_75 is too old: the GPU kernels need sm_80 or later; use cpu"),
        ("", r"unknown target '' \("),
    ],
)
def test_targets_that_are_none(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(BuildConfig(target=target), facts(bfloat16=1000))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not nvrtc.available(), reason="no NVRTC")
def test_the_compiler_of_kernels_knows_every_target() -> None:
    count = ctypes.c_int()
    nvrtc.library().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    nvrtc.library().nvrtcGetSupportedArchs(found)
    assert set(KNOWN_SM) <= set(found)


@pytest.mark.parametrize("name", BuildConfig.__struct_fields__)
@pytest.mark.parametrize("value", [b"x", 1.5, {"a": 1}, [2]], ids=repr)
def test_values_of_other_types_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be ") as caught:
        resolve(BuildConfig(**{name: value}), facts())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_share_of_memory_is_above_0_and_at_most_1(share: float, target: str) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_fraction must be above 0 and at most 1, not "):
        resolve(BuildConfig(target=target, gpu_memory_fraction=share), facts())


@pytest.mark.parametrize(("target", "idle"), [("cpu", True), ("sm_90", False)])
def test_a_share_of_memory_that_changes_nothing_is_said(target: str, idle: bool) -> None:
    notes = resolve(BuildConfig(target=target, gpu_memory_fraction=0.5), facts())[1]
    assert idle == ("gpu_memory_fraction is for GPU engines, and has no effect on a CPU" in notes)
