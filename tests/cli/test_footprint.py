"""What running costs and leaves behind: no file, no torch, no needless import, no process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pelton.errors import MissingDependencyError
from pelton.kernels.gpu import driver, nvrtc
from tests.cli.conftest import FAKE_MAIN, Run, fake_pelton

HEAVY = {"torch", "transformers", "fastapi", "starlette", "pydantic", "uvicorn", "rich", "zmq", "asyncio"}
HEAVY |= {"prometheus_client", "huggingface_hub", "httpx", "safetensors", "gguf", "pelton.builder"}

REPORT_MODULES = """
import atexit, json, os
atexit.register(lambda: os.write(2, json.dumps(sorted(sys.modules)).encode()))
"""

#: Makes ``import torch`` fail as where it is not installed.
NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
"""


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | env
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=full, check=True, timeout=60
    )


def test_importing_pelton_imports_next_to_nothing() -> None:
    out = python(
        "import sys; before = set(sys.modules); import pelton; print(*set(sys.modules) - before)"
    ).stdout
    ours = {name for name in out.split() if name.startswith("pelton")}
    assert ours == {"pelton", "pelton.version"}
    assert not {"numpy", "click", "msgspec", "tokenizers", "jinja2"} & set(out.split())


def test_every_public_name_can_be_imported_without_torch() -> None:
    names = "LLM AsyncLLM SamplingParams RequestOutput CompletionOutput BuildConfig Session PeltonError"
    python(NO_TORCH + f"import pelton\nfor name in {names!r}.split(): getattr(pelton, name)")


def test_help_imports_nothing_heavy_and_not_even_numpy() -> None:
    program = "import sys\nfrom pelton.serving.cli.main import run_command\nrun_command(['--help'])\n"
    modules = set(json.loads(python("import sys" + REPORT_MODULES + program).stderr))
    assert not (HEAVY | {"numpy", "tokenizers", "jinja2"}) & modules


def test_running_an_engine_imports_nothing_heavy(fake_engine: Path) -> None:
    with fake_pelton(
        "run", fake_engine, "x", "--max-tokens", 2, program="import sys" + REPORT_MODULES + FAKE_MAIN
    ) as p:
        out, err = p.communicate(timeout=60)
    assert p.returncode == 0
    assert len(out) == 3
    assert not HEAVY & set(json.loads(err))


@pytest.mark.parametrize("args", [["run", "x", "--max-tokens", "2"], ["inspect"]])
def test_an_engine_runs_where_torch_cannot_be_imported(fake_engine: Path, args: list[str]) -> None:
    command, *rest = args
    with fake_pelton(command, fake_engine, *rest, program=NO_TORCH + FAKE_MAIN) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out


def test_building_where_torch_is_missing_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with fake_pelton("run", tmp_path / "model.gguf", "x", program=NO_TORCH + FAKE_MAIN) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "needs torch: pip install 'pelton[build]'" in err


def _tree(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")}


@pytest.mark.parametrize("args", [["run", "x", "--max-tokens", "2"], ["inspect"], ["chat"]])
def test_running_an_engine_writes_nothing(fake_engine: Path, tmp_path: Path, args: list[str]) -> None:
    folders = {}
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
    work = tmp_path / "work"
    work.mkdir()
    env = dict(os.environ) | {k: str(v) for k, v in folders.items()} | {"PYTHONDONTWRITEBYTECODE": "1"}
    before, engine_before = _tree(tmp_path), _tree(fake_engine)
    command, *rest = args
    with fake_pelton(command, fake_engine, *rest, env=env, cwd=work) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert _tree(tmp_path) == before
    assert _tree(fake_engine) == engine_before


def test_inspect_json_has_everything(run: Run, fake_engine: Path) -> None:
    record = json.loads(run("inspect", fake_engine, "--json", "--plan").out)
    assert record["model"]["name"] == "fake-model"
    assert record["build"]["max_seq_len"] == 256
    assert record["report"]["notes"] == ["nothing was built"]
    assert {"memory", "tactics", "manifest", "plan", "engine_id"} <= set(record)


def test_bench_json_has_every_measure(run: Run, fake_engine: Path) -> None:
    result = run("bench", fake_engine, "--rounds", 1, "--tokens", 4, "--no-start", "--json")
    record = json.loads(result.out)
    assert record["decode_batch_1"]["ms_per_step"] > 0
    assert record["decode_batch_8"]["tokens_per_second"] > 0
    assert 0 < record["host_step"]["ms"] <= record["host_step"]["p99_ms"]
    assert "prefill is left out" in result.err  # the fake engine takes 255 tokens


def test_doctor_and_version(run: Run) -> None:
    assert run("version").out.startswith("pelton ")
    assert run("--version").out == run("version").out
    record = json.loads(run("doctor", "--json").out)
    assert {part["name"] for part in record["optional"]} >= {"torch", "fastapi", "zmq"}


def test_doctor_of_a_machine_without_a_gpu_or_its_compilers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is needed to run engines for CPUs."""

    def no_driver() -> None:
        raise MissingDependencyError("there is no NVIDIA driver here (libcuda.so.1); build it for the CPU")

    monkeypatch.setattr(driver, "library", no_driver)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    result = run("doctor")
    assert result.code == 0
    assert "gpu             none (there is no NVIDIA driver here (libcuda.so.1))\n" in result.out
    assert "NVRTC             no: pip install 'pelton[cuda]'" in result.out
    assert "Engines run here." in result.out


def test_every_setting_is_a_flag(run: Run) -> None:
    from pelton.engine.config import BuildConfig
    from pelton.runtime.request import SamplingParams
    from pelton.serving.cli.options import SINGULAR

    for command in ("build", "run", "chat", "serve", "bench"):
        text = run(command, "--help").out
        for name in BuildConfig.__struct_fields__:
            field = SINGULAR.get(name, name)
            assert f"--{field.replace('_', '-')} " in text, (command, field)
    for field in SamplingParams.__struct_fields__:
        assert f"--{field.replace('_', '-')} " in run("run", "--help").out
