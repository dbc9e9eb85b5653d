"""What the GPU's tests share: kernels compiled once, tiny engines built once, a stop where the GPU dies.

They run in one process (``make test-gpu``): kernels are compiled by several, and what is left takes seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pelton.builder.build import build
from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.builder.target import gpu_available
from pelton.engine.config import BuildConfig
from pelton.errors import PeltonError
from pelton.ir.op import all_ops
from pelton.kernels import conformance_cuda
from pelton.kernels.gpu.driver import Device, call
from tests.builder.paper_gpu import WithTokenizer
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

DTYPES = ("bfloat16", "float32", "float16")
CONFIG = TINY_LLAMA | {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not gpu_available():
        pytest.skip("no GPU")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A kernel that breaks the GPU's context fails all tests after it: stop, and say which it was."""
    if not report.failed:
        return
    try:
        Device().make_current()
        call("cuCtxSynchronize")
    except PeltonError as error:
        pytest.exit(
            f"{report.nodeid} broke the GPU's context ({error}): nothing more runs here", returncode=1
        )


def _callspec(item: pytest.Function, fixture: str) -> Any:
    return getattr(item, "callspec", None) if fixture in item.fixturenames else None


@pytest.fixture(scope="session")
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeviceRunner]:
    """Runs conformance cases of the tactics that tests were chosen for; their kernels have been compiled."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = {(c.params["name"], c.params["dtype"]) for i in items if (c := _callspec(i, "kernels"))}
    folder = tmp_path_factory.mktemp("kernels") / "all"
    sm = Device().sm
    every = (case for op in all_ops().values() for case in conformance_cuda.cases(op, DTYPES, sm=sm))
    compile_cases((case for case in every if (case.tactic.name, case.dtype) in chosen), sm, folder)
    with DeviceRunner(folder) as runner:
        yield runner


@pytest.fixture(scope="session", params=DTYPES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A tiny engine, which can be served where ``tokenizers`` is there, and its type of weights."""
    path = tmp_path_factory.mktemp("engines") / "tiny.engine"
    spoken = importlib.util.find_spec("tokenizers") is not None
    checkpoint = (WithTokenizer if spoken else RandomCheckpoint)(CONFIG, quant=request.param)
    report = build(checkpoint, BuildConfig(target="cuda", max_batch_size=40), output=path)
    assert report.quality is not None
    assert report.quality.runner == "cuda"
    return path, request.param


@pytest.fixture(scope="session", params=["bfloat16", "float32"])
def deterministic_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose answers do not depend on the batch."""
    path = tmp_path_factory.mktemp("engines") / "deterministic.engine"
    config = BuildConfig(target="cuda", max_batch_size=40, max_num_tokens=300, deterministic=True)
    build(RandomCheckpoint(CONFIG, quant=request.param), config, output=path)
    return path
