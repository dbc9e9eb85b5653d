"""Decode steps replayed from graphs: a launch keeps the arguments that it was captured with."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from pelton.engine.session import Session
from pelton.kernels.gpu.null import NullLibrary, null_gpu
from pelton.kernels.stage.cuda import Segments
from pelton.runtime.executor import Executor
from tests.builder.paper_gpu import build_paper_engine
from tests.kernels.stage_reference import stage_reference
from tests.runtime.test_executor import drain, make_request, tokens_of

VOCAB, ROWS = 300, 4
#: Arguments of the kernels that are played.
STAGE = (C.c_uint64,) * 3 + (C.c_int32,) * 2 + (Segments,)
SCAN = (C.c_uint64, C.c_int32) + (C.c_uint64,) * 9


def ints(address: int, n: int) -> np.ndarray:
    return np.ctypeslib.as_array((C.c_int32 * n).from_address(address))


class Replaying:
    """A null GPU with graphs. ``scan`` samples the token after the one that a row of logits is of."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.recorded: list[tuple[Any, list[Any], tuple[int, ...]]] | None = None
        self.graphs: list[list[tuple[Any, list[Any], tuple[int, ...]]]] = []
        self.replays = 0
        self.temperatures: list[list[float]] = []

    def bodies(self) -> dict[str, Any]:
        return {"stage": self.body(self.stage, STAGE), "scan": self.body(self.scan, SCAN)}

    def body(self, play: Any, types: tuple[Any, ...]) -> Any:
        def run(parameters: Any) -> None:
            values = [t.from_buffer_copy(t.from_address(p)) for t, p in zip(types, parameters, strict=False)]
            work = play, [getattr(v, "value", v) for v in values], self.gpu.grid
            if self.recorded is not None:
                self.recorded.append(work)
            else:
                play(*work[1], work[2])

        return run

    def attach(self, gpu: NullLibrary) -> None:
        self.gpu: Any = gpu
        gpu.cuStreamBeginCapture_v2 = self.begin
        gpu.cuStreamEndCapture = self.end
        gpu.cuGraphInstantiateWithFlags = self.instantiate
        gpu.cuGraphLaunch = self.replay

    def begin(self, *_: Any) -> int:
        self.recorded = []
        return 0

    def end(self, _stream: Any, graph: Any) -> int:
        assert self.recorded is not None
        self.graphs.append(self.recorded)
        graph._obj.value = len(self.graphs)
        self.recorded = None
        return 0

    def instantiate(self, executable: Any, graph: Any, _flags: Any) -> int:
        executable._obj.value = graph.value
        return 0

    def replay(self, executable: Any, _stream: Any) -> int:
        for play, values, grid in self.graphs[executable.value - 1]:
            play(*values, grid)
        self.replays += 1
        return 0

    def stage(
        self, packed: int, inputs: int, sampled: int, n: int, ids: int, segments: Segments, _grid: Any
    ) -> None:
        room = self.runner._inputs.nbytes // 4
        places = self.runner._inputs.memory.nbytes // 4
        stage_reference(ints(packed, room), ints(inputs, places), ints(sampled, ROWS), n, ids, segments)

    def scan(self, *given: Any) -> None:
        *values, grid = given
        rows, temperature, (tokens, tokens_host) = grid[1], values[2], values[-2:]
        there = self.runner._inputs.addresses
        wanted = ints(there["logits_indices"], rows)
        sampled = (ints(there["input_ids"], 128)[wanted] + 1) % VOCAB
        ints(tokens, rows)[:] = ints(tokens_host, rows)[:] = sampled
        self.temperatures.append(ints(temperature, rows).view(np.float32).tolist())

    @property
    def runner(self) -> Any:
        assert self.session is not None
        return self.session._runner


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_paper_engine(tmp_path_factory.mktemp("gpu") / "paper.engine", max_batch_size=ROWS)


@pytest.fixture
def replaying(engine: Path) -> Iterator[Replaying]:
    played = Replaying()
    with null_gpu(played.bodies()) as gpu:
        played.attach(gpu)
        with Session(engine, kv_blocks=40) as session:
            played.session = session
            yield played


def test_each_replay_lays_out_its_own_inputs_and_gives_its_own_tokens(replaying: Replaying) -> None:
    """Sequences come and end, so that steps of several sizes take turns in both slots."""
    executor = Executor(replaying.session)  # type: ignore[arg-type]
    lengths = {"a": 40, "b": 9, "c": 23, "d": 31, "e": 17}
    for i, (name, n) in enumerate(lengths.items()):
        prompt = [7 * i, 90 + 11 * i]
        executor.add(make_request(name, prompt, max_tokens=n, ignore_eos=True))
    answers = drain(executor)
    for i, (name, n) in enumerate(lengths.items()):
        tokens = tokens_of(answers[name])
        assert tokens == [91 + 11 * i + j for j in range(n)], name
    assert replaying.replays > 30
    executor.close()


def test_rows_are_greedy_again_after_others_drew(replaying: Replaying) -> None:
    """So are those that a graph is padded with: three sequences run as four."""
    executor = Executor(replaying.session)  # type: ignore[arg-type]

    def decode(**asks: float) -> list[list[float]]:
        for name in "abc":
            executor.add(make_request(name, [5, 6], max_tokens=9, ignore_eos=True, **asks))
        replaying.temperatures.clear()
        drain(executor)
        return [row for row in replaying.temperatures if len(row) == ROWS]

    assert all(t == [0, 0, 0, 0] for t in decode())
    hot = np.float32(0.7).item()
    assert [hot, hot, hot, 0] in decode(temperature=0.7)
    assert all(t == [0, 0, 0, 0] for t in decode())
    executor.close()
