"""docs/extending.md: the package written there, installed, built and run from the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pelton.kernels import native
from tests.checkpoint.makers import tiny_hf_checkpoint
from tests.page_package import install, pelton, python

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)

C_TACTIC = '@pelton.tactic("my::swish_norm", source=C_SOURCE, priority=20)'


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELTON_CACHE", str(tmp_path_factory.mktemp("pelton-cache")))
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_hf_checkpoint("llama", tmp_path_factory.mktemp("checkpoints"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["SwishForCausalLM"]
    config["swish_beta"] = 1.5
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Built:
    """An engine, and the package whose model and tactics it has."""

    engine: Path
    package: Path


def build(folder: Path, checkpoint: Path, **replacements: str) -> Built:
    """By default order: timed, NumPy may win in large steps."""
    built = Built(folder / "swish.engine", install(folder / "site", **replacements))
    code, out, err = pelton("build", checkpoint, "-o", built.engine, "--no-timing", path=built.package)
    assert code == 0, out + err
    return built


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Built:
    """The page's package as it is."""
    return build(tmp_path_factory.mktemp("page"), checkpoint)


@pytest.fixture(scope="module")
def in_python(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Built:
    """Its tactic in C left out."""
    return build(tmp_path_factory.mktemp("python"), checkpoint, **{C_TACTIC: ""})


@needs_compiler
def test_code_runs_where_the_engine_was_built_or_is_trusted(tmp_path: Path, page: Built) -> None:
    elsewhere = str(tmp_path / "another-users-cache")
    code, out, err = pelton("run", page.engine, "hello", PELTON_CACHE=elsewhere)
    assert code == 2, out + err
    assert re.search(r"carries code \(compiled/\w+\.so.*--trust", re.sub(r"\s+", " ", err)), err
    code, out, err = pelton("run", page.engine, "hello", "--trust", "--max-tokens", 2, PELTON_CACHE=elsewhere)
    assert code == 0, out + err


def tactics_of(engine: Path) -> set[str]:
    plan = json.loads((engine / "plan.json").read_text())
    return {c["tactic"] for i in plan["instructions"] if i["op"] == "my::swish_norm" for c in i["tactics"]}


COMPARE = """
import sys
import numpy as np
from pelton.builder.probe import probe_steps
from pelton.engine.session import Session

logits = {}
for runner in ("native", "reference"):
    with Session(sys.argv[1], runner=runner, kv_blocks=64) as session:
        assert session.runner_name == runner
        steps, _ = probe_steps(session.config, session.engine.tokenizer_path, seed=3)
        logits[runner] = np.concatenate([session.run(step).logits_NV.copy() for step in steps])
error = np.abs(logits["native"] - logits["reference"]).max() / np.abs(logits["reference"]).max()
assert error < 1e-4, error
print("error", error)
"""


@needs_compiler
def test_the_pages_package_is_built_and_run_from_the_command_line(tmp_path: Path, page: Built) -> None:
    package, engine = page.package, page.engine
    assert tactics_of(engine) == {"my_swish.ops:swish_norm_c"}
    (library,) = (engine / "compiled").iterdir()
    manifest = json.loads((engine / "manifest.json").read_text())
    assert f"compiled/{library.name}" in [f["path"] for f in manifest["files"]]
    code, out, err = pelton("run", engine, "hello", "--max-tokens", 4, "--temperature", 0)
    assert code == 0, out + err  # compiled code needs no package
    hidden = tmp_path / "hidden.engine"
    shutil.copytree(engine, hidden)
    manifest["files"] = [f for f in manifest["files"] if not f["path"].startswith("compiled/")]
    (hidden / "manifest.json").write_text(json.dumps(manifest))
    code, out, err = pelton("run", hidden, "hello")
    assert code == 2
    assert "no file of the" in re.sub(r"\s+", " ", err), err
    code, out, err = pelton("inspect", engine, path=package)
    assert "my::swish_norm" in out, out + err
    code, out, err = python(COMPARE, engine, path=package)
    assert code == 0, err


@needs_compiler
def test_tactics_from_outside_are_timed_beside_each_other(tmp_path: Path, checkpoint: Path) -> None:
    package, engine = install(tmp_path / "site"), tmp_path / "swish.engine"
    code, out, err = pelton("build", checkpoint, "-o", engine, "--max-num-tokens", 16, path=package)
    assert code == 0, out + err
    rows = [
        t for t in json.loads((engine / "report.json").read_text())["tactics"] if t["op"] == "my::swish_norm"
    ]
    timed = {"my_swish.ops:swish_norm_c", "my_swish.ops:swish_norm_numpy", "my::swish_norm.reference"}
    assert rows
    for row in rows:
        assert row["microseconds"].keys() == timed
        assert row["tactic"] != "my::swish_norm.reference"


def test_a_python_tactic_runs_in_the_engine_and_needs_its_package(in_python: Built) -> None:
    package, engine = in_python.package, in_python.engine
    assert tactics_of(engine) == {"my_swish.ops:swish_norm_numpy"}
    plan = json.loads((engine / "plan.json").read_text())
    assert plan["external"]["my_swish.ops:swish_norm_numpy"] == {
        "kind": "python",
        "function": "my_swish.ops:swish_norm_numpy",
        "tensors": ["x"],
        "package": "my-swish",
        "version": "1.0",
    }
    assert json.loads((engine / "manifest.json").read_text())["packages"] == {"my-swish": "1.0"}
    code, out, err = python(COMPARE, engine, path=package)
    assert code == 0, err
    code, out, err = pelton("run", engine, "hello")
    assert code == 2, out + err
    assert "the engine needs my-swish 1.0, which is not installed here" in err


def test_an_op_without_a_tactic_runs_its_reference_in_the_engine(tmp_path: Path, checkpoint: Path) -> None:
    package = install(
        tmp_path / "site",
        **{
            C_TACTIC: "",
            '@pelton.tactic("my::swish_norm")': "",
        },
    )
    engine = tmp_path / "swish.engine"
    code, out, err = pelton("build", checkpoint, "-o", engine, "--no-timing", path=package)
    assert code == 0, out + err
    assert tactics_of(engine) == {"my::swish_norm.reference"}
    assert "my::swish_norm has no tactic for a CPU: its reference in PyTorch" in re.sub(
        r"\s+", " ", out + err
    )
    code, out, err = python(COMPARE, engine, path=package)
    assert code == 0, err


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.0f + expf", "1.1f + expf", r"swish_norm_c of my::swish_norm is not used: .*normalised error"),
        (
            "float* row = pelton",
            "float row = pelton",
            r"is not used: the C source of .* does not compile: line:",
        ),
        (
            "np.exp(-beta * x)",
            "np.exp(-bet * x)",
            r"swish_norm_numpy .* is not used: .*NameError: name 'bet'",
        ),
    ],
)
def test_a_tactic_that_is_wrong_is_dropped_with_a_sentence(
    tmp_path: Path, checkpoint: Path, old: str, new: str, message: str
) -> None:
    package, engine = install(tmp_path / "site", **{old: new}), tmp_path / "swish.engine"
    code, out, err = pelton("build", checkpoint, "-o", engine, "--no-timing", path=package)
    assert code == 0, out + err
    assert re.search(message, re.sub(r"\s+", " ", out + err)), out + err
    assert len(tactics_of(engine)) == 1


def test_a_broken_package_is_named(tmp_path: Path, checkpoint: Path) -> None:
    package = install(tmp_path / "site", **{"import numpy as np": "import no_such_module"})
    code, out, err = pelton("build", checkpoint, "-o", tmp_path / "swish.engine", path=package)
    assert code == 2, out + err
    assert "the package my-swish 1.0 offers SwishForCausalLM to Pelton" in err.replace("\n", " "), err
    assert "No module named 'no_such_module'" in err
    assert "Traceback" not in err


FAIL = """
import sys
import numpy as np
from pelton.builder.probe import probe_steps
from pelton.engine.session import Session
from pelton.errors import TacticError

with Session(sys.argv[1], runner="native", kv_blocks=64, threads=2) as session:
    steps, _ = probe_steps(session.config, session.engine.tokenizer_path, seed=3)
    before = session.run(steps[0]).logits_NV.copy()
    exp, np.exp = np.exp, None
    for _ in range(300):  # threads may be anywhere when one of them fails
        try:
            session.run(steps[0])
        except TacticError as error:
            message = str(error)
        else:
            raise AssertionError("the step did not fail")
    np.exp = exp
    print(message)
    np.testing.assert_array_equal(session.run(steps[0]).logits_NV, before)
"""


def test_an_exception_in_a_python_tactic_ends_the_step_with_one_sentence(in_python: Built) -> None:
    code, out, err = python(FAIL, in_python.engine, path=in_python.package)
    assert code == 0, err
    assert re.match(
        r"model.layers.0.mlp.swish_norm \(my::swish_norm\): the Python tactic "
        r"my_swish.ops:swish_norm_numpy failed: TypeError: ",
        out,
    ), out


def test_two_builds_with_c_tactics_are_the_same_bytes(tmp_path: Path, checkpoint: Path, page: Built) -> None:
    again = build(tmp_path, checkpoint)
    one, other = (json.loads((e / "manifest.json").read_text()) for e in (page.engine, again.engine))
    assert one == other


@pytest.mark.slow
def test_the_pages_package_is_built_for_a_gpu_that_is_not_there(tmp_path: Path, checkpoint: Path) -> None:
    pytest.importorskip("triton")
    package, engine = install(tmp_path / "site"), tmp_path / "swish.engine"
    with (package / "my_swish" / "ops.py").open("a") as file:
        file.write("\n\nimport my_swish.triton_ops\n")
    cache = str(tmp_path / "cache")
    code, out, err = pelton(
        "build", checkpoint, "-o", engine, "--target", "sm_90", path=package, TRITON_CACHE_DIR=cache
    )
    assert code == 0, out + err
    assert tactics_of(engine) == {"my_swish.triton_ops:swish_norm_triton"}
    kernels = json.loads((engine / "compiled" / "code.json").read_text())["kernels"]
    assert {"swish_norm_kernel", "broadcast", "reduce"} <= {kernel["name"] for kernel in kernels}
