"""Tactics checked and timed on this machine, and what whole builds make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder import selection, timing_cache
from pelton.builder.build import build
from pelton.builder.clock import Clock
from pelton.builder.compile import Compiled, compile_model
from pelton.builder.probe import Piece, make_batch
from pelton.builder.signature import OperandSignature, Signature, StepSignature
from pelton.builder.timing import NativeTimer
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.engine.shapes import OptimizationProfile
from pelton.errors import ConfigError, EngineError
from pelton.kernels import native
from pelton.kernels.tactic import Tactic, all_tactics
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")

WIDE = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
LIMITS: dict[str, Any] = {"max_batch_size": 2, "max_num_tokens": 32}
#: Products stay ``linear``, of which there are several tactics.
PLAIN: dict[str, Any] = {**LIMITS, "passes": {"explicit_quantise": "off", "gemm_swiglu": "off"}}


def compiled(path: Path | None = None, quant: str = "q4_1", **settings: Any) -> Compiled:
    config = BuildConfig(**{**PLAIN, **settings})
    clock = Clock(lambda stage, done, total: None)
    return compile_model(RandomCheckpoint(WIDE, quant=quant), config, clock, timing_cache=path)


def add_signature(rows: int = 3) -> Signature:
    value = OperandSignature(kind="value", dtype="float32", shape=(rows, 48))
    return Signature(
        op="add",
        inputs=(value, replace(value, strides=(96, 1))),
        attrs={},
        activations="float32",
        threads=2,
        step=None,
        reuse_bytes=1 << 20,
        tokens=rows,
    )


def test_a_kernel_that_computes_something_else_is_found_out() -> None:
    timer = NativeTimer(2)
    assert timer.check(add_signature(), Tactic(name="cpu.add", op="add", supports=lambda node: True)) is None
    why = timer.check(add_signature(), Tactic(name="cpu.mul", op="add", supports=lambda node: True))
    assert why is not None
    assert "normalised error" in why


@pytest.mark.parametrize("passes", [PLAIN["passes"], {}])
def test_every_call_of_a_model_can_be_checked_and_timed_in_every_bucket(passes: dict[str, str]) -> None:
    model = compiled(timing=False, passes=passes)
    timer = NativeTimer(2)
    seen: dict[str, set[str]] = {}
    for decisions in model.selected.choice.decisions:
        for decision in decisions:
            tactic, signature = decision.tactic, decision.signature
            assert tactic is not None
            if signature.key in seen.setdefault(signature.op, set()):
                continue
            seen[signature.op].add(signature.key)
            assert timer.check(signature, tactic) is None
            assert timer.time(signature, [tactic])[tactic.name] > 0
    product = "linear" if passes else "linear_q8"
    assert {"embedding", "paged_attention", "rope_kv_write", "take_rows", product} <= seen.keys()


def test_a_large_weight_is_timed_on_part_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.builder.timing.MAX_WEIGHT", 1)
    weight = OperandSignature(kind="weight", dtype="q8_0", shape=(1024, 256))
    x = OperandSignature(kind="value", dtype="float32", shape=(4, 256))
    signature = replace(add_signature(4), op="linear", inputs=(x, weight, None))
    tactic = all_tactics()["cpu.linear.q8_0.x16.f32"]
    part = NativeTimer(1).time(
        replace(signature, inputs=(x, replace(weight, shape=(256, 256)), None)), [tactic]
    )
    whole = NativeTimer(1).time(signature, [tactic])
    assert 1.5 < whole[tactic.name] / part[tactic.name] < 10  # 4, but for other work on this machine


def test_a_steps_queries_and_keys_are_a_mix_of_prefill_and_decode() -> None:
    step = StepSignature(tokens=64, sequences=8, context=32)
    assert step.queries == (57, 1, 1, 1, 1, 1, 1, 1)
    assert step.keys == (57, 32, 32, 32, 32, 32, 32, 32)
    assert step.blocks(16) == 4 + 7 * 2


# ---- Builds ----


def test_an_engine_keeps_the_times_it_was_chosen_by(tmp_path: Path) -> None:
    cache = tmp_path / "times.json"
    report = build(
        RandomCheckpoint(WIDE, quant="q4_1"),
        BuildConfig(**PLAIN),
        output=tmp_path / "e",
        timing_cache=cache,
    )
    assert report.machine is not None
    timed = report.machine.timed
    assert timed > 0
    assert (tmp_path / "e" / "timing_cache.json").read_bytes() == cache.read_bytes()
    assert f"{report.candidates} candidates, {timed} timed, 0 from cache" in report.text()
    engine = open_engine(tmp_path / "e", verify=True)
    assert engine.manifest.cpu_level == "any"
    rows = {(r.op, r.shape, r.max_tokens): r for r in report.tactics}
    choices = [
        i.tactics for i in engine.plan.instructions if i.name == "model.layers.0.self_attn.qkv_proj.linear"
    ]
    ends = [choice.max_tokens for choice in choices[0]]
    assert ends == sorted(set(ends))
    assert ends[-1] == 32
    # Some CPUs have more kernels to choose among.
    assert rows["linear", "2x256 512x256", 2].microseconds.keys() >= {
        "cpu.linear.q4_1.x16.f32",
        "cpu.linear.q4_1.x16.int8",
    }


def test_the_same_cache_gives_the_same_plan(tmp_path: Path) -> None:
    first = compiled(tmp_path / "times.json")
    second = compiled(tmp_path / "times.json")
    assert (second.selected.timed, second.selected.cached) == (0, first.selected.timed)
    assert second.plan == first.plan


def test_other_limits_add_to_the_cache_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    compiled(path)
    before = timing_cache.read_timing_cache(path).entries
    compiled(path, profiles=(OptimizationProfile.parse("T=1:1:2"), OptimizationProfile.parse("T=3:5:32")))
    after = timing_cache.read_timing_cache(path).entries
    assert before.items() < after.items()


def test_a_cache_of_another_machine_stops_the_build_at_once(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    elsewhere = timing_cache.TimedOn(
        cpu="Another CPU", cpu_level="avx2", cores=64, native_abi=1, library="x", pelton="0"
    )
    timing_cache.write_timing_cache(path, timing_cache.TimingCache(timed_on=elsewhere))
    with pytest.raises(ConfigError, match=r"times\.json does not hold here: .*CPU Another CPU instead of"):
        compiled(path)


def test_a_forced_tactic_runs_every_call_it_supports() -> None:
    model = compiled(plugins={"linear": "cpu.linear.q4_1.x16.f32"})
    used = {c.tactic for i in model.plan.instructions if i.op == "linear" for c in i.tactics}
    assert used == {"cpu.linear.q4_1.x16.f32"}
    assert any("the plugin, being explicit, wins" in note for note in model.notes)
    assert model.selected.timed == 0


def test_passes_leave_calls_with_a_chosen_tactic_alone() -> None:
    chosen = compiled(passes={}, plugins={"linear": "cpu.linear.q4_1.x16.f32"}, timing=False)
    assert {i.op for i in chosen.plan.instructions if i.op.startswith("linear")} == {"linear"}
    left = compiled(passes={}, timing=False)
    assert "linear_q8" in {i.op for i in left.plan.instructions}


def test_a_disabled_op_leaves_an_engine_for_the_reference(tmp_path: Path) -> None:
    report = build(
        RandomCheckpoint(TINY_LLAMA),
        BuildConfig(**LIMITS, plugins={"softcap": "disable", "linear": "disable"}),
        output=tmp_path / "e",
    )
    assert report.quality is not None
    assert report.quality.runner == "reference"
    assert "no native kernel for linear" in report.text()
    assert any("plugin softcap=disable has no effect" in note for note in report.notes)


def test_workspace_holds_every_tactic_of_the_table() -> None:
    model = compiled(timing=False)
    known = all_tactics()
    choice = model.selected.choice
    for table, spec in zip(choice.tables, choice.specs, strict=True):
        for tokens, tactic in table:
            assert known[tactic.name].workspace(spec, tokens) <= model.plan.workspace_bytes


# ---- Other CPUs ----


def other_level() -> str:
    """A level whose kernels are in the library, and that this machine does not call its own."""
    return "avx2" if native.cpu_level() != "avx2" else "avx512"


def only_at(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the float32 product had been compiled for ``level`` alone."""
    kernels = {**native.library_kernels(), "cpu.linear.q4_1.x16.f32": (level,)}
    monkeypatch.setattr(native, "library_kernels", lambda: kernels)


def test_another_level_is_not_timed_and_takes_kernels_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    level = other_level()
    model = compiled(cpu_level=level)
    assert model.selected.timed == 0
    assert any(f"times for cpu_level {level} cannot be measured" in note for note in model.notes)
    assert model.selected.cpu_level == "any"  # every kernel has a baseline version
    only_at("avx512", monkeypatch)
    forced = {"linear": "cpu.linear.q4_1.x16.f32"}
    assert compiled(cpu_level="avx512", timing=False, plugins=forced).selected.cpu_level == "avx512"
    with pytest.raises(ConfigError, match="is for another device or CPU level than the build's target"):
        compiled(cpu_level="avx2", timing=False, plugins=forced)


def test_a_cache_shipped_from_the_other_cpu_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level, path = other_level(), tmp_path / "times.json"
    with pytest.raises(ConfigError, match=f"there is no timing cache .*give a cache from a {level} CPU"):
        compiled(path, cpu_level=level)
    here = compiled(path)  # stands in for a run on the other machine
    measured = timing_cache.read_timing_cache(path)
    there = timing_cache.TimedOn(
        cpu="Other", cpu_level=level, cores=measured.timed_on.cores, native_abi=measured.timed_on.native_abi,
        library=measured.timed_on.library, pelton=measured.timed_on.pelton,
    )  # fmt: skip
    timing_cache.write_timing_cache(path, timing_cache.TimingCache(timed_on=there, entries=measured.entries))
    model = compiled(path, cpu_level=level)
    assert (model.selected.timed, model.selected.cached) == (0, here.selected.timed)
    assert model.plan == here.plan


def test_a_cpu_below_the_engines_level_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "needed_level", lambda choice, cpu_level: cpu_level)
    build(RandomCheckpoint(TINY_LLAMA), BuildConfig(**LIMITS), output=tmp_path / "e")
    level = native.cpu_level()
    assert open_engine(tmp_path / "e").manifest.cpu_level == level
    monkeypatch.setattr(native, "has_level", lambda name: name != level)
    monkeypatch.setattr(native, "cpu_level", lambda: "avx2")
    with pytest.raises(EngineError, match=f"built for CPUs of level {level}, and this one is avx2; rebuild"):
        open_engine(tmp_path / "e")


def test_checks_run_in_small_steps_however_large_the_bucket() -> None:
    model = compiled(timing=False, max_num_tokens=2048)
    largest = [decisions[-1].signature for decisions in model.selected.choice.decisions]
    assert {s.step.tokens for s in largest if s.step is not None} == {2048}
    smalls = [s.small for s in largest if s.step is not None]
    assert all(s is not None and s.step is not None and s.step.tokens == 96 for s in smalls)


def test_steps_of_each_bucket_run_their_own_tactic(tmp_path: Path) -> None:
    """Times that favour float32 for one token and int8 for more: the results show which one ran."""
    path = tmp_path / "times.json"
    compiled(path)
    measured = timing_cache.read_timing_cache(path)
    entries = {
        key: {name: 1.0 if name.endswith("f32") == ("float32[1," in key) else 9.0 for name in entry}
        for key, entry in measured.entries.items()
    }
    timing_cache.write_timing_cache(
        path, timing_cache.TimingCache(timed_on=measured.timed_on, entries=entries)
    )
    checkpoint = RandomCheckpoint(WIDE, quant="q4_1")
    config = BuildConfig(**PLAIN)
    build(checkpoint, config, output=tmp_path / "both", timing_cache=path)
    for name, activations in (("exact", "float32"), ("rough", "int8")):
        only = {"linear": "auto"} if name == "exact" else {"linear": "cpu.linear.q4_1.x16.int8"}
        settings = {**PLAIN, "activations": activations, "kv_dtype": "float16", "plugins": only}
        build(checkpoint, BuildConfig(**settings), output=tmp_path / name, timing_cache=None)
    logits = {name: first_logits(tmp_path / name) for name in ("both", "exact", "rough")}
    one, many = 0, 1
    np.testing.assert_allclose(logits["both"][one], logits["exact"][one], atol=1e-4)
    assert np.abs(logits["both"][one] - logits["rough"][one]).max() > 1e-3
    np.testing.assert_array_equal(logits["both"][many], logits["rough"][many])


def first_logits(engine: Path) -> list[np.ndarray]:
    """Of a step of one token, and of one of 17."""
    results = []
    with Session(engine, kv_blocks=4, threads=1) as session:
        for n in (1, 17):
            piece = Piece(tokens=np.arange(n, dtype=np.int32), start=0, blocks=np.arange(2, dtype=np.int32))
            results.append(session.run(make_batch([piece], session.config)).logits_NV.copy())
    return results
