"""Tactics from outside Pelton on the native runner: Python functions and C source."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pelton.engine.external import Externals
from pelton.engine.plan import ExternalTactic, Instruction, Plan
from pelton.errors import BuildError, ConfigError, EngineError, MissingDependencyError
from pelton.ir import op as ir_op
from pelton.ir.op import get_op
from pelton.kernels import compile_c, conformance, native
from pelton.kernels import tactic as kernels_tactic
from pelton.kernels.host import import_function
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, all_tactics
from pelton.kernels.user_op import op
from pelton.kernels.user_tactic import tactic

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")

NAMES = {"python": "tests.kernels.outside:swish_norm_numpy", "library": "tests.kernels.outside:swish_norm_c"}
needs_compiler = pytest.mark.skipif(
    not any(map(compile_c.shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)


@pytest.fixture(scope="module", autouse=True)
def outside() -> Iterator[Any]:
    """``tests.kernels.outside``; what it registers is gone after these tests."""
    from tests.kernels import outside

    yield outside
    for name in ("swish_norm", "mean_and_rest"):
        ir_op._OPS.pop(f"outside::{name}")
    kernels_tactic._REGISTERED.clear()


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[native.Team]:
    with native.Team(request.param) as team:
        yield team


def cases(name: str) -> list[conformance.Case]:
    found = [c for c in conformance.cases(get_op("outside::swish_norm")) if c.tactic.name == name]
    assert len(found) == 3
    return found


@needs_compiler
@pytest.mark.parametrize("name", [*NAMES.values(), "outside::swish_norm.reference"])
def test_tactics_from_outside_match_the_reference(name: str, team: native.Team) -> None:
    for case in cases(name):
        conformance.check(case, team)


@pytest.mark.parametrize(
    "name", ["tests.kernels.outside:mean_and_rest_numpy", "outside::mean_and_rest.reference"]
)
def test_several_results_optional_tensors_strings_and_defaults(name: str, team: native.Team) -> None:
    found = [c for c in conformance.cases(get_op("outside::mean_and_rest")) if c.tactic.name == name]
    assert len(found) == 2
    for case in found:
        conformance.check(case, team)


def wrong(function: Callable[..., Any], kind: str = "python", source: str = "") -> Tactic:
    made = all_tactics()[NAMES["python"]]
    return replace(made, kind=kind, implementation=function, source=source, function="wrong")


def test_wrong_values_changed_inputs_and_exceptions_are_found(team: native.Team, outside: Any) -> None:
    def too_large(x: Any, beta: float, out: Any) -> None:
        outside.swish_norm_numpy(x, beta, out)
        out *= 1.001

    def changes_its_input(x: Any, beta: float, out: Any) -> None:
        outside.swish_norm_numpy(x, beta, out)
        x[0] = 0

    def fails(x: Any, beta: float, out: Any) -> None:
        raise RuntimeError("no licence")

    case = cases(NAMES["python"])[0]
    for function, message in (
        (too_large, "normalised error 0.001"),
        (changes_its_input, "changed its input 0"),
        (lambda x, beta, out: None, "is nan, reference"),
        (fails, "raised RuntimeError: no licence"),
    ):
        with pytest.raises(conformance.ConformanceError, match=message):
            conformance.check(replace(case, tactic=wrong(function)), team)
    conformance.check(case, team)  # the team is as good as before


@needs_compiler
def test_c_that_does_not_compile_is_named_with_its_first_error(tmp_path: Any) -> None:
    source = "#include <nothing.h>\nvoid wrong(void) { return 1 +; }"
    with pytest.raises(BuildError, match=r"C source of my.tactic does not compile: line:1:10: .*nothing.h"):
        compile_c.compile_c(source, tmp_path, cpu_level="avx2", label="my.tactic")


def test_without_a_compiler_the_sentence_says_what_to_install(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(MissingDependencyError, match="no C compiler on this machine; install one"):
        compile_c.compile_c("", tmp_path, cpu_level="avx2", label="my.tactic")


@needs_compiler
def test_the_same_c_source_gives_the_same_bytes(tmp_path: Any, outside: Any) -> None:
    made = [
        compile_c.compile_c(outside.C_SOURCE, tmp_path / folder, cpu_level="avx2", label="x")
        for folder in ("a", "b")
    ]
    assert made[0].name == made[1].name
    assert made[0].read_bytes() == made[1].read_bytes()


def test_the_public_header_is_plain_c(tmp_path: Any) -> None:
    if not any(map(compile_c.shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    source = tmp_path / "a.c"
    source.write_text('#include "pelton_kernel.h"\nint main(void) { return 0; }\n')
    command = [compile_c.compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    subprocess.run([*command, f"-I{compile_c.INCLUDE}", "-c", "a.c"], check=True, cwd=tmp_path)


def test_supports_gets_the_ops_arguments(outside: Any) -> None:
    seen: list[Any] = []

    def supports(x: TensorSpec, beta: float) -> bool:
        seen.append((x, beta))
        return beta > 1

    tactic("outside::swish_norm", name="picky", supports=supports)(outside.swish_norm_numpy)
    x = TensorSpec(dtype="float32", shape=("T", 8))
    node = NodeSpec(op="outside::swish_norm", inputs=(x,), attrs={"beta": 1.5})
    assert all_tactics()["tests.kernels.outside:picky"].supports(node)
    assert seen == [(x, 1.5)]


def test_a_function_of_the_op_is_the_reference_eagerly_and_into_an_array(outside: Any) -> None:
    x = torch.randn(3, 8)
    expected = outside.swish_norm(x, 1.5)
    torch.testing.assert_close(expected, outside.swish_norm.op.reference(x, 1.5))
    out = np.empty((3, 8), np.float32)
    outside.swish_norm(x=x.numpy(), beta=1.5, out=out)
    np.testing.assert_array_equal(out, expected.numpy())
    assert tuple(outside.swish_norm(torch.empty(7, 8, device="meta"), 1.5).shape) == (7, 8)


def function(x: Any, beta: float, out: Any) -> None: ...


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (lambda: op("swish(Tensor x) -> Tensor")(lambda x: x), "'swish' needs a namespace of your own"),
        (lambda: op("pelton::a(Tensor x) -> Tensor")(lambda x: x), "the namespace pelton is Pelton's own"),
        (lambda: op("out::a(Tensor x -> Tensor")(lambda x: x), "op out::a: the schema cannot be read"),
        (lambda: op("out::a(Tensor[] x) -> Tensor")(lambda x: x), r"x is a List\[Tensor\]; an op takes"),
        (lambda: op("out::a(Tensor(a!) x) -> Tensor")(lambda x: x), "x is written in place"),
        (lambda: op("out::a(Tensor x) -> int")(lambda x: x), "must return Tensor"),
        (
            lambda: op("out::a(Tensor x, float b) -> Tensor")(lambda x: x),
            "has the arguments x, b, and .* takes x",
        ),
        (
            lambda: op("outside::swish_norm(Tensor x, float beta) -> Tensor")(lambda x, beta: x),
            "registered twice: by tests.kernels.outside.swish_norm and",
        ),
        (lambda: tactic("out::nothing")(function), "there is no op out::nothing; define it first"),
        (lambda: tactic("outside::swish_norm")(lambda x, beta, out: None), "must stand at the top level"),
        (lambda: tactic("outside::swish_norm", name="a")(samples_like), "it must take x, beta, out"),
        (lambda: tactic("outside::swish_norm", source="int x;")(function), "defines no function function"),
        (lambda: tactic("outside::swish_norm", device="tpu")(function), "there is no device 'tpu'"),
        (lambda: tactic("outside::swish_norm", name=NAMES["python"])(function), "two tactics are called"),
    ],
)
def test_definitions_that_cannot_be_used_are_refused(define: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        define()


def samples_like(x: Any, out: Any) -> None: ...


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match=r"needs my-package 1\.2, which is not installed here"):
        import_function("no_such_package.ops:swish", "my-package", "1.2")
    with pytest.raises(
        EngineError, match=r"needs tests.kernels.outside:gone of tests, which cannot be imported"
    ):
        import_function("tests.kernels.outside:gone")
    with pytest.raises(EngineError, match="that is no function"):
        import_function("tests.kernels.outside:C_SOURCE")


@pytest.mark.parametrize(
    "file", ["/lib/libc.so.6", "../compiled/a.so", "compiled/../../a.so", "compiled/a/b.so", ""]
)
def test_a_plan_gets_code_from_its_engine_only(tmp_path: Path, file: str) -> None:
    external = {"mine": ExternalTactic(kind="library", function="getpid", file=file)}
    plan = Plan(
        dims={},
        logits=0,
        buffers=(),
        operands=(),
        instructions=(),
        arena_bytes=0,
        workspace_bytes=0,
        external=external,
    )
    instruction = Instruction(op="my::op", name="here", inputs=(), outputs=())
    with pytest.raises(EngineError, match=f"damaged: its plan wants code from {re.escape(repr(file))}"):
        Externals(plan, tmp_path).resolve("mine", instruction)


@needs_compiler
def test_a_library_without_its_function_is_refused(tmp_path: Path, outside: Any) -> None:
    path = compile_c.compile_c(outside.C_SOURCE, tmp_path / "compiled", cpu_level="generic", label="x")
    for function, file in (("gone", path.name), ("swish_norm_c", "gone.so")):
        external = {"mine": ExternalTactic(kind="library", function=function, file=f"compiled/{file}")}
        plan = Plan(
            dims={}, logits=0, buffers=(), operands=(), instructions=(), arena_bytes=0, workspace_bytes=0,
            external=external,
        )  # fmt: skip
        with pytest.raises(EngineError, match=r"compiled code cannot be used here .*; rebuild it"):
            Externals(plan, tmp_path).resolve(
                "mine", Instruction(op="my::op", name="here", inputs=(), outputs=())
            )
