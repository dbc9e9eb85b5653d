"""What the GPU's tests share: kernels compiled once, tiny engines built once, a stop where the GPU dies.

They run in one process (``make test-gpu``). Kernels are compiled by others, from the first test on, while
engines are built and tried.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pelton.builder.build import build
from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.builder.target import gpu_available
from pelton.engine.config import BuildConfig
from pelton.errors import PeltonError
from pelton.ir.op import all_ops
from pelton.kernels import conformance_cuda, telling_cases
from pelton.kernels.gpu.driver import Device, call
from tests.builder.paper_gpu import WithTokenizer
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

#: float16 goes the ways of bfloat16, but for its range.
DTYPES = ("bfloat16", "float32", pytest.param("float16", marks=pytest.mark.slow))
#: Samples of each tactic and type in the quick tests: the telling ones.
FEW = 3
TELLING, EVERY = "telling", "every"
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


class Compiling:
    """Conformance cases of the tests that were chosen, being compiled into ``folder``."""

    def __init__(self, items: list[pytest.Item], folder: Path, say: Callable[[str], None]) -> None:
        found = [getattr(item, "callspec", None) for item in items if "kernels" in _fixtures(item)]
        self._chosen = {
            tuple(c.params[n] for n in ("name", "dtype", "samples")) for c in found if c is not None
        }
        self.folder = folder
        self._say = say
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            start, sm = time.perf_counter(), Device().sm
            cases = [case for samples in (TELLING, EVERY) for case in self._cases(samples, sm)]
            cases = list({str(case): case for case in cases}.values())
            failed = compile_cases(cases, sm, self.folder)
            seconds = time.perf_counter() - start
            self._say(f"{len(cases)} cases compiled in {seconds:.0f} s, {len(failed)} not")
        except BaseException as error:
            self._error = error

    def _cases(self, samples: str, sm: int) -> list[conformance_cuda.Case]:
        wanted = {(name, dtype) for name, dtype, which in self._chosen if which == samples}
        dtypes = tuple(sorted({dtype for _, dtype in wanted}))
        ops = all_ops().values() if wanted else ()
        every = [case for op in ops for case in conformance_cuda.cases(op, dtypes, sm=sm)]
        own = [case for case in every if (case.tactic.name, case.dtype) in wanted]
        return own if samples == EVERY else telling_cases.telling(own, FEW)

    def wait(self) -> Path:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.folder


def _fixtures(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


@pytest.fixture(scope="session", autouse=True)
def compiling(
    _gpu: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Compiling:
    """Begins with the first test."""
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    folder = tmp_path_factory.mktemp("kernels") / "all"
    return Compiling(request.session.items, folder, lambda text: reporter.write_line(f" [{text}]"))


@pytest.fixture(scope="session")
def kernels(compiling: Compiling) -> Iterator[DeviceRunner]:
    """Runs conformance cases, whose kernels have been compiled."""
    with DeviceRunner(compiling.wait()) as runner:
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


#: Heads and columns that every kernel of sm_90 takes.
WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 504}
#: Name -> shape, type of the checkpoint's matrices, what is asked of the build besides.
DETERMINISTIC: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "bfloat16": (CONFIG, "bfloat16", {}),
    "wide": (WIDE, "bfloat16", {}),
    "fp8": (WIDE, "fp8_row", {"dtype": "bfloat16", "activations": "fp8"}),
    "int8": (WIDE, "int8_row", {"dtype": "bfloat16"}),
    "int4": (WIDE, "int4_g128", {"dtype": "bfloat16"}),
    "float32": (CONFIG, "float32", {}),
}
_QUICK = ("wide",)


@pytest.fixture(
    scope="session",
    params=[n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in DETERMINISTIC],
)
def deterministic_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose answers do not depend on the batch."""
    shape, dtype, how = DETERMINISTIC[request.param]
    path = tmp_path_factory.mktemp("engines") / "deterministic.engine"
    config = BuildConfig(target="cuda", max_batch_size=40, max_num_tokens=300, deterministic=True, **how)
    build(RandomCheckpoint(shape, quant=dtype), config, output=path)
    return path
