"""A plan that passed the check cannot make a kernel touch memory that is not its own, whatever was edited."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pelton.engine.artifact import open_engine
from pelton.engine.op_rules import RULES, Bound, bind
from pelton.engine.plan import Plan
from pelton.engine.plan_check import check_plan
from pelton.ir.op import all_ops
from pelton.kernels import native
from pelton.kernels.tactic import all_tactics, shipped_tactics

MUTATIONS = 1500
#: Attributes of plans for GPUs alone: native kernels round nothing so, and refuse plans that say it.
OF_GPUS = ("x_scale", "x_codes", "y_scale", "y_codes")


def test_every_native_op_has_a_rule() -> None:
    ops = {tactic.op for tactic in all_tactics().values() if tactic.device == "cpu"}
    assert ops - RULES.keys() == set(), "add the op's shapes to engine/op_rules.py"
    for name in ops:
        assert shipped_tactics(name).keys() == {t.name for t in all_tactics().values() if t.op == name}


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_takes_what_the_op_takes_and_its_attributes(name: str) -> None:
    op, rule = all_ops()[name], RULES[name]
    parameters = op.torch_op._schema.arguments
    named = [p.name for p in parameters if "Tensor" not in str(p.type)]
    assert [name for name in named if name not in OF_GPUS] == list(rule.attrs)
    assert sum("Tensor" in str(p.type) for p in parameters) == len(rule.inputs)
    for sample in op.samples(torch.Generator().manual_seed(0)):
        args = list(sample.args) + [p.default_value for p in parameters[len(sample.args) :]]
        tensors = [a for a, p in zip(args, parameters, strict=True) if "Tensor" in str(p.type)]
        attrs = {p.name: a for a, p in zip(args, parameters, strict=True) if "Tensor" not in str(p.type)}
        result = op.reference(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
        outputs = () if result is None else result if isinstance(result, tuple) else (result,)
        bound: Bound = {}
        shapes: list[Any] = []
        for term, tensor in (
            *zip(rule.inputs, tensors, strict=True),
            *zip(rule.outputs, outputs, strict=True),
        ):
            if tensor is None:
                assert term.optional
                continue
            shape: Any = tuple(tensor.shape)
            if term.dims[0] in ("t", "n"):
                shape = ({"t": "T", "n": "N"}[term.dims[0]], *shape[1:])  # what a plan calls it
            shapes.append(shape)
            assert rule.matches is not None or bind(term, shape, bound), (sample.name, term, shape, bound)
        count = len(tensors)
        assert rule.matches is None or rule.matches(shapes[:count], shapes[count:], attrs), sample.name
        assert all(where(bound) for where in rule.where), sample.name


def mutate(plan: dict[str, Any], rng: random.Random) -> str:
    """Change one thing of ``plan``; what it was."""
    where = rng.choice(("dims", "buffers", "operands", "instructions", "plan"))
    if where == "dims":
        name = rng.choice(list(plan["dims"]))
        plan["dims"][name] = number(plan["dims"][name], rng)
        return f"dims.{name}"
    if where == "plan":
        name = rng.choice(("logits", "arena_bytes", "workspace_bytes"))
        plan[name] = number(plan[name], rng)
        return name
    item = rng.choice(plan[where])
    field = rng.choice(list(item))
    other = rng.choice(plan[where])
    item[field] = changed(item[field], other.get(field), rng)
    return f"{where} {item.get('name')} {field} {item[field]!r}"


def changed(value: Any, other: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return number(value, rng)
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, 1e30, -1e-30))
    if isinstance(value, str):
        return rng.choice((other or "", "T", "arena", "float32", "uint8", "cpu.rope", "x16", "q8_0", ""))
    if isinstance(value, list):
        value = list(value)
        action = rng.randrange(4)
        if action == 0 and value:
            del value[rng.randrange(len(value))]
        elif action == 1 and isinstance(other, list):
            return list(other)
        elif action == 2 and value:
            rng.shuffle(value)
        elif value:
            i = rng.randrange(len(value))
            value[i] = changed(value[i], other[0] if isinstance(other, list) and other else None, rng)
        return value
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {**value, key: changed(value[key], None, rng)}
    return value


def number(value: int, rng: random.Random) -> int:
    return rng.choice(
        (0, 1, -1, value + 1, value - 1, 2 * value, value // 2, value + 64, 1 << 31, 1 << 62, -value)
    )


# Runs every plan of standard input that passes the check, at its largest step.
RUN = """
import json, sys
import numpy as np
import msgspec
from pelton.builder.probe import Piece, make_batch
from pelton.engine.artifact import open_engine
from pelton.engine.kv_cache import allocate
from pelton.engine.native_runner import NativeRunner
from pelton.engine.plan import Plan
from pelton.errors import PeltonError
engine = open_engine(sys.argv[1])
config, blocks = engine.config, 12
caches = allocate(config, (blocks,))
size, count = config.build.block_size, config.build.max_num_tokens
pieces = [Piece(tokens=np.arange(count, dtype=np.int32) % 50, start=0,
                blocks=np.arange(-(-count // size), dtype=np.int32) % blocks)]
batch = make_batch(pieces, config, logits=list(range(min(4, count))))
for line in sys.stdin:
    what, plan = json.loads(line)
    print(what, flush=True)
    try:
        runner = NativeRunner(msgspec.convert(plan, Plan, strict=False), engine.weights, caches, 2)
    except PeltonError as error:
        print("refused:", error, flush=True)
        continue
    try:
        runner.run(batch, ())
    except ValueError:
        pass
    runner.close()
print("done")
"""


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("seed", range(2))
def test_edited_plans_are_refused_or_run(tiny_engine: Path, seed: int) -> None:
    engine = open_engine(tiny_engine)
    original = json.loads((tiny_engine / "plan.json").read_text())
    rng = random.Random(seed)
    lines, refused = [], 0
    for _ in range(MUTATIONS):
        plan = copy.deepcopy(original)
        what = "; ".join(mutate(plan, rng) for _ in range(rng.choice((1, 1, 2))))
        try:
            decoded = msgspec.json.decode(json.dumps(plan), type=Plan)
            check_plan(decoded, engine.config, engine.weights.meta)
        except (msgspec.MsgspecError, ValueError):
            refused += 1
            continue
        lines.append(json.dumps([what, plan]))
    assert refused > MUTATIONS // 2
    assert len(lines) > 20
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tiny_engine)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
        env={
            "PYTHONPATH": ":".join(p for p in sys.path if p),
            "MALLOC_PERTURB_": "165",
            "OMP_NUM_THREADS": "1",
        },
        timeout=120,
    )
    last = done.stdout.splitlines()[-1:]
    assert (done.returncode, last) == (0, ["done"]), (last, done.stderr[-2000:])
    assert done.stdout.count("refused:") < len(lines) // 4, "the check refuses, not the runner"


def test_the_check_does_not_slow_opening(tiny_engine: Path) -> None:
    engine = open_engine(tiny_engine)
    import time

    started = time.process_time()
    check_plan(engine.plan, engine.config, engine.weights.meta)
    assert time.process_time() - started < 0.05
