"""An engine on a GPU against the same plan on the PyTorch reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.attended_keys import AttendedKeys
from pelton.builder.build import build
from pelton.engine.artifact import open_engine
from pelton.engine.batch import InputBatch
from pelton.engine.batch_sampling import PendingStep, SamplingInputs
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from pelton.runtime.request import RequestUpdate, SamplingParams
from pelton.runtime.validation import resolve_requests
from tests.builder.random_checkpoint import RandomCheckpoint
from tests.e2e.stepper import Stepper, relative_error
from tests.gpu.conftest import CONFIG, WIDE

pytestmark = pytest.mark.gpu

#: Rounding to 8 bits of mantissa, twice as often as a layer has steps.
BOUND = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-4}


def prompts(n: int, seed: int = 0) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    return {i: rng.integers(0, 500, int(rng.integers(1, 90))).tolist() for i in range(n)}


def test_logits_are_the_reference_s(engine: tuple[Path, str]) -> None:
    path, dtype = engine
    with Session(path, kv_blocks=400) as gpu, Session(path, kv_blocks=400, runner="reference") as reference:
        a, b = Stepper(gpu), Stepper(reference)
        for new in (prompts(5), {0: [3], 2: [4], 3: [5]}, {0: [6], 1: [7, 8, 9], 4: [1]}, {2: [11]}):
            got, want = a.step(new), b.step(new)
            for s in new:
                assert relative_error(got[s], want[s]) < BOUND[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_caches_of_8_bits_give_the_reference_s_logits(kv_dtype: str, tmp_path: Path) -> None:
    """A key or value that rounds otherwise is a step of its code: a hundredth of the largest."""
    path = tmp_path / "codes.engine"
    config = BuildConfig(target="cuda", max_batch_size=40, kv_dtype=kv_dtype)
    build(RandomCheckpoint(CONFIG, quant="bfloat16"), config, output=path)
    with Session(path, kv_blocks=400) as gpu, Session(path, kv_blocks=400, runner="reference") as reference:
        a, b = Stepper(gpu), Stepper(reference)
        for new in (prompts(5), {0: [3], 2: [4], 3: [5]}, {0: [6], 1: [7, 8, 9], 4: [1]}, {2: [11]}):
            got, want = a.step(new), b.step(new)
            for s in new:
                assert relative_error(got[s], want[s]) < 5e-2


def test_keys_are_stored_less_the_same_vector_in_steps_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One far from all keys: one kernel that did not take it would move logits by 15 % and more."""
    means = AttendedKeys.means
    monkeypatch.setattr(AttendedKeys, "means", lambda seen: {k: v + 1 for k, v in means(seen).items()})
    path = tmp_path / "codes.engine"
    config = BuildConfig(target="cuda", dtype="bfloat16", max_batch_size=40, kv_dtype="fp8")
    build(RandomCheckpoint(WIDE, quant="bfloat16"), config, output=path, check=False)
    assert open_engine(path).weights["k_shift.0"].view(np.float32).mean() > 0.5
    with Session(path, kv_blocks=400) as gpu, Session(path, kv_blocks=400, runner="reference") as reference:
        a, b = Stepper(gpu), Stepper(reference)
        for new in (prompts(5), {0: [3], 2: [4], 3: [5]}, {0: [6], 1: [7, 8, 9], 4: [1]}, {2: [11]}):
            got, want = a.step(new), b.step(new)
            for s in new:
                error = relative_error(got[s], want[s])
                print(f"{error:.4f}")
                assert error < 8e-2


def without_graphs(session: Session) -> None:
    session._runner._graphs.padded = lambda dims, decode: None  # type: ignore[union-attr, method-assign]


def test_small_steps_with_prompts_by_graphs_agree_with_steps_without(engine: tuple[Path, str]) -> None:
    """Padded, another kernel may run: within the type's bound; with tokens of no sequence, nothing else."""
    path, dtype = engine
    with Session(path, kv_blocks=900) as graphs, Session(path, kv_blocks=900) as eager:
        without_graphs(eager)
        a, b = Stepper(graphs), Stepper(eager)
        for turn in range(4):  # eager and padded, captured, replayed twice
            first, second, third = (100 * turn + i for i in range(3))
            for new in (
                {first: prompts(1, seed=turn)[0][:21], second: [5, 6, 7]},
                {first: [8], second: [9, 10], third: list(range(40 + turn))},
                {first: [8], second: [9], third: [11, 12]},
            ):
                got, want = a.step(new), b.step(new)
                for s in new:
                    assert relative_error(got[s], want[s]) < BOUND[dtype]
        assert any(g is not None for g in graphs._runner._graphs._mixed.values())  # type: ignore[union-attr]


def test_decoding_by_graphs_equals_decoding_step_by_step(engine: tuple[Path, str]) -> None:
    path, _ = engine
    with Session(path, kv_blocks=600) as graphs, Session(path, kv_blocks=600) as eager:
        without_graphs(eager)
        a, b = Stepper(graphs), Stepper(eager)
        for n in (1, 2, 3, 9, 17, 33, 40):
            new = prompts(n, seed=n)
            new = {100 * n + i: ids for i, ids in new.items()}
            np.testing.assert_array_equal(_stack(a.step(new)), _stack(b.step(new)))
            for _ in range(2):
                one = {s: [7] for s in new}
                np.testing.assert_array_equal(_stack(a.step(one)), _stack(b.step(one)))


def test_named_tensors_come_back(engine: tuple[Path, str]) -> None:
    path, dtype = engine
    with Session(path, kv_blocks=100) as gpu, Session(path, kv_blocks=100, runner="reference") as reference:
        name = next(o.name for o in gpu.engine.plan.operands if o.name.endswith("paged_attention"))
        seen = {}
        for session in (gpu, reference):
            stepper = Stepper(session)
            run = session.run
            session.run = lambda batch, run=run: seen.setdefault(id(run), run(batch, [name]))  # type: ignore
            stepper.step({0: [1, 2, 3]})
        x, y = (_float(result.outputs[name]) for result in seen.values())
        assert relative_error(x, y) < BOUND[dtype]


def _float(values: np.ndarray) -> np.ndarray:
    """bfloat16 comes as its bits."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _stack(logits: dict[int, np.ndarray]) -> np.ndarray:
    return np.concatenate(list(logits.values()))


def answers(session: Session, ahead: bool, params: list[SamplingParams]) -> dict[str, list[int]]:
    executor = Executor(session, ExecutorConfig())
    if not ahead:
        executor._ahead = None
    got: dict[str, list[int]] = {}
    rng = np.random.default_rng(5)
    for i, one in enumerate(params):
        ids = rng.integers(0, 500, int(rng.integers(1, 60))).tolist()
        for request in resolve_requests(ids, one, session.config, None, str(i), 0):
            executor.add(request)
    while executor.has_work:
        for update in executor.step():
            assert update.finish_reason != "error", update.error
            got.setdefault(update.request_id, []).extend(update.new_token_ids)
    return got


def test_running_ahead_gives_the_answers_of_the_host_s_sampler(engine: tuple[Path, str]) -> None:
    path, _ = engine
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, max_tokens=n, seed=7, ignore_eos=True)
        for t, k, p, m, n in (
            *((0.0, 0, 1.0, 0.0, n) for n in (1, 2, 17, 40)),
            *((0.8, 0, 1.0, 0.0, n) for n in (5, 30)),
            (1.0, 20, 1.0, 0.0, 30),
            (1.0, 0, 0.9, 0.0, 30),
            (1.2, 50, 0.8, 0.05, 30),
        )
    ]
    with Session(path, kv_blocks=600) as session:
        ahead, host = answers(session, True, params), answers(session, False, params)
    assert ahead.keys() == host.keys()
    # A sum in float32 may move a draw at its very edge; a wrong rule moves nearly all.
    same = sum(ahead[r] == host[r] for r in host)
    assert same >= len(params) - 1, (ahead, host)
    assert all(ahead[str(i)] == host[str(i)] for i in range(4))


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.2, "frequency_penalty": 0.6},
    {"logit_bias": {3: 5.0, 77: 6.0, 499: -9.0}, "repetition_penalty": 1.2},
    {"allowed_token_ids": tuple(range(100, 200))},
    {"min_tokens": 20, "stop_token_ids": tuple(range(0, 500, 2))},
    {"logprobs": 5},
    {"logprobs": 2, "frequency_penalty": 1.0},
    {"logprobs": 0, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
]


def updates_of(session: Session, ahead: bool, num_seqs: int) -> tuple[int, dict[str, list[RequestUpdate]]]:
    """How often the device sampled, and what each request of ``EDITS`` got, twice over."""
    executor = Executor(session, ExecutorConfig(max_num_seqs=num_seqs))
    if not ahead:
        executor._ahead = None
    submits, submit = 0, session.submit
    rng, got = np.random.default_rng(6), dict[str, list[RequestUpdate]]()

    def counted(batch: InputBatch, sampling: SamplingInputs) -> PendingStep:
        nonlocal submits
        submits += 1
        return submit(batch, sampling)

    session.submit = counted  # type: ignore[method-assign]
    for i, edits in enumerate(EDITS * 2):
        ids = rng.integers(0, 500, int(rng.integers(1, 60))).tolist()
        every: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "seed": i, "ignore_eos": True}
        params = SamplingParams(**every | edits)
        for request in resolve_requests(ids, params, session.config, None, str(i), 0):
            executor.add(request)
    while executor.has_work:
        for update in executor.step():
            assert update.finish_reason != "error", update.error
            got.setdefault(update.request_id, []).append(update)
    session.submit = submit  # type: ignore[method-assign]
    return submits, got


def test_edited_and_scored_requests_answer_as_if_the_host_sampled(engine: tuple[Path, str]) -> None:
    """In fewer seats than requests, so that seats are given away."""
    path, dtype = engine
    with Session(path, kv_blocks=600) as session:
        submits, ahead = updates_of(session, True, 5)
        none, host = updates_of(session, False, 5)
    assert submits > 20
    assert none == 0
    same = 0
    for request, wanted in host.items():
        tokens, expected = ([t for u in us for t in u.new_token_ids] for us in (ahead[request], wanted))
        if tokens != expected:  # a sum in float32 may move a draw at its edge
            continue
        same += 1
        for a, b in zip(ahead[request], wanted, strict=True):
            assert a.finish_reason == b.finish_reason
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.token_ids[0] == y.token_ids[0]
                np.testing.assert_allclose(x.logprobs, y.logprobs, atol=5 * BOUND[dtype])
                assert x.rank == y.rank or dtype != "float32"
    # Steps are not composed alike, and 16 bits may choose another of two likely tokens, or rank it otherwise.
    assert same >= (len(host) - 1 if dtype == "float32" else len(host) // 2), (ahead, host)


def test_a_deterministic_engine_answers_alike_in_any_company(deterministic_engine: Path) -> None:
    everyone = prompts(24, seed=3)
    alone: dict[int, np.ndarray] = {}
    for s, ids in everyone.items():
        with Session(deterministic_engine, kv_blocks=40) as session:
            stepper = Stepper(session)
            alone[s] = np.concatenate([stepper.step({s: ids})[s], stepper.step({s: [5]})[s]])
    with Session(deterministic_engine, kv_blocks=400) as session:
        stepper = Stepper(session)
        half = {s: ids[: len(ids) // 2] for s, ids in everyone.items() if len(ids) > 1}
        for start in range(0, 24, 6):  # prompts in two chunks, beside others
            stepper.step({s: ids for s, ids in half.items() if start <= s < start + 6})
        rest: dict[int, np.ndarray] = {}
        for start in range(0, 24, 4):
            part = {s: everyone[s][len(half.get(s, ())) :] for s in range(start, start + 4)}
            rest |= stepper.step(part)
        more = stepper.step({s: [5] for s in everyone})
    for s in everyone:
        np.testing.assert_array_equal(np.concatenate([rest[s], more[s]]), alone[s])


def answers_with_logprobs(executor: Executor, prompts: dict[str, list[int]], sampled: bool) -> dict[str, Any]:
    """Tokens of each prompt and, unless ``sampled``, their log-probabilities, bit for bit."""
    for name, ids in prompts.items():
        params = SamplingParams(
            temperature=0.9 if sampled else 0.0,
            seed=11,
            max_tokens=30,
            ignore_eos=True,
            logprobs=None if sampled else 0,
        )
        for request in resolve_requests(ids, params, executor.session.config, None, name, 0):
            executor.add(request)
    got: dict[str, Any] = {name: ([], []) for name in prompts}
    while executor.has_work:
        for update in executor.step():
            assert update.finish_reason != "error", update.error
            got[update.request_id][0].extend(update.new_token_ids)
            got[update.request_id][1].extend(update.logprobs or ())
    return got


@pytest.mark.parametrize("sampled", [False, True], ids=["log-probabilities", "sampled"])
def test_a_deterministic_engine_answers_alike_alone_cached_and_preempted(
    deterministic_engine: Path, sampled: bool
) -> None:
    rng = np.random.default_rng(4)
    everyone = {str(i): rng.integers(0, 500, int(rng.integers(20, 90))).tolist() for i in range(16)}
    with Session(deterministic_engine, kv_blocks=40) as session:
        alone = {}
        for name, ids in everyone.items():
            executor = Executor(session, ExecutorConfig(enable_prefix_caching=False))
            alone |= answers_with_logprobs(executor, {name: ids}, sampled)
            executor.close()
        crowded = Executor(session, ExecutorConfig(enable_prefix_caching=False))
        assert answers_with_logprobs(crowded, everyone, sampled) == alone
        assert crowded.scheduler.num_preemptions > 0
        crowded.close()
    with Session(deterministic_engine, kv_blocks=400) as session:
        caching = Executor(session, ExecutorConfig())
        assert answers_with_logprobs(caching, everyone, sampled) == alone
        assert answers_with_logprobs(caching, everyone, sampled) == alone
        assert caching.stats().prefix_hit_tokens > 0
        caching.close()
