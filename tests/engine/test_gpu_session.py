"""A session on a GPU that is not there: memory that runs out, a device that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.engine.cuda.graphs import _MOST_MIXED, decode_sizes
from pelton.engine.session import Session
from pelton.errors import ConfigError, DeviceError, EngineError
from pelton.kernels.gpu.driver import Stream, capture
from pelton.kernels.gpu.null import NullLibrary, null_gpu
from pelton.runtime.executor import Executor
from tests.builder.paper_gpu import build_paper_engine
from tests.runtime.test_executor import drain, make_request

ILLEGAL_ADDRESS, OUT_OF_MEMORY = 700, 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_paper_engine(tmp_path_factory.mktemp("gpu") / "paper.engine")


@pytest.fixture
def gpu() -> Iterator[NullLibrary]:
    with null_gpu() as null:
        null.cuGetErrorString = say  # type: ignore[method-assign]
        yield null


def say(code: int, text: Any) -> int:
    text._obj.value = b"an illegal memory access was encountered"
    return 0


@pytest.mark.parametrize("taken", range(1, 12))
def test_memory_that_runs_out_while_a_session_opens_is_all_given_back(
    engine: Path, gpu: NullLibrary, taken: int
) -> None:
    allocate, count = gpu.cuMemAlloc_v2, 0

    def limited(pointer: Any, size: Any) -> int:
        nonlocal count
        count += 1
        return OUT_OF_MEMORY if count > taken else allocate(pointer, size)

    gpu.cuMemAlloc_v2 = limited  # type: ignore[method-assign]
    try:
        with pytest.raises(ConfigError, match=r"the GPU( has)? no .*B (left: .* are free|of page-locked)"):
            Session(engine, kv_blocks=8)
    finally:
        assert not gpu._memory, f"{len(gpu._memory)} allocations were kept"


def test_a_gpu_too_full_for_the_weights_is_refused_before_anything_is_taken(
    engine: Path, gpu: NullLibrary
) -> None:
    with pytest.raises(ConfigError, match=r"needs .* for weights and work; .* are free on null, of which 0%"):
        Session(engine, gpu_memory_fraction=1e-4)
    assert not gpu._memory


def test_a_gpu_that_fails_ends_the_executor_and_closes_quietly(engine: Path, gpu: NullLibrary) -> None:
    session = Session(engine, kv_blocks=40)
    executor = Executor(session)
    executor.add(make_request("a", [1, 2, 3], max_tokens=20))
    for _ in range(3):
        executor.step()
    for name in ("cuEventSynchronize", "cuStreamSynchronize", "cuLaunchKernelEx", "cuGraphLaunch"):
        setattr(gpu, name, lambda *_: ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError, match=r"the GPU failed \(cu.*\): an illegal memory access .* restart"):
        drain(executor)
    executor.close()
    session.close()
    assert [pool.num_used for pool in executor.kv.pools] == [0]


def test_no_memory_for_a_step_s_graph_ends_the_executor_with_the_setting_to_change(
    engine: Path, gpu: NullLibrary
) -> None:
    with Session(engine, kv_blocks=40) as session:
        executor = Executor(session)
        executor.add(make_request("a", [1, 2, 3], max_tokens=20))
        gpu.cuGraphInstantiateWithFlags = lambda *_: OUT_OF_MEMORY  # type: ignore[method-assign]
        with pytest.raises(DeviceError, match=r"the GPU has no memory left .* use a smaller gpu_memory_frac"):
            drain(executor)
        executor.close()


def test_a_launch_that_is_refused_while_a_graph_is_made_is_said_itself(
    engine: Path, gpu: NullLibrary
) -> None:
    with Session(engine, kv_blocks=40) as session:
        stream = Stream()
        gpu.cuStreamEndCapture = lambda *_: ILLEGAL_ADDRESS  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="refused"), capture(stream):
            raise EngineError("refused")
        with pytest.raises(DeviceError, match="illegal"), capture(stream):
            pass
        assert session.samples


def test_random_traffic_takes_no_memory_once_it_is_warm(engine: Path, gpu: NullLibrary) -> None:
    """As ``tests/gpu/test_cuda_leaks.py`` on a GPU: allocations, graphs and events, and the blocks."""
    made: Counter[str] = Counter()
    pairs = {
        "cuEventCreate": "cuEventDestroy_v2",
        "cuGraphInstantiateWithFlags": "cuGraphExecDestroy",
        "cuStreamCreate": "cuStreamDestroy_v2",
        "cuModuleLoadData": "cuModuleUnload",
    }
    for make, end in pairs.items():
        for name, change in ((make, 1), (end, -1)):

            def count(*args: Any, name: str = make, change: int = change, begins: bool = name == make) -> int:
                made[name] += change
                if begins:
                    args[0]._obj.value = 1
                return 0

            setattr(gpu, name, count)
    rng = np.random.default_rng(0)
    session = Session(engine, kv_blocks=40)
    executor = Executor(session)
    held: list[tuple[int, int]] = []
    for step in range(400):
        while len(executor._sequences) < 6:
            name = str(rng.integers(1 << 40))
            prompt = rng.integers(0, 250, int(rng.integers(1, 60))).tolist()
            penalty = 1.1 if rng.random() < 0.1 else 1.0  # these need their logits on the host
            request = make_request(
                name, prompt, max_tokens=int(rng.integers(1, 20)), repetition_penalty=penalty, ignore_eos=True
            )
            executor.add(request)
            if rng.random() < 0.1:
                executor.abort(name)
        executor.step()
        if step >= 200:  # graphs of steps with prompts still come, up to a bound of their own
            held.append((len(gpu._memory), made.total() - made["cuGraphInstantiateWithFlags"]))
    assert len(set(held)) == 1, sorted(set(held))
    # Of a decode step one for each slot, with the sampler's scan or without.
    assert made["cuGraphInstantiateWithFlags"] <= _MOST_MIXED + 4 * len(decode_sizes(40))
    executor.close()
    assert [pool.num_used for pool in executor.kv.pools] == [0]
    session.close()
    assert not gpu._memory
    assert not +made, made  # all that was made is gone


@pytest.mark.parametrize("largest", [1, 3, 8, 20, 256, 300, 512, 4096])
def test_graphs_are_padded_by_a_quarter_at_most_and_powers_of_two_by_nothing(largest: int) -> None:
    sizes = decode_sizes(largest)
    most = min(largest, 512)
    assert sizes[-1] == most
    assert {2**i for i in range(10) if 2**i <= most} <= set(sizes)
    for n in range(1, most + 1):
        size = min(s for s in sizes if s >= n)
        assert size - n < max(8, n / 4)
