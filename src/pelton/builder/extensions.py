"""What packages outside Pelton add to a build: ops, and tactics that are checked before they are used.

Every tactic from outside is held to its op's reference, on the op's own samples and on random operands
of the shapes that the model has. What departs, raises or does not compile is dropped, with a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from pelton import plugins
from pelton.builder.calls import Call, Program, Root
from pelton.builder.external import describe
from pelton.builder.tactics import node_spec
from pelton.engine.plan import Plan
from pelton.errors import BuildError, MissingDependencyError
from pelton.ir.op import NAMESPACE, Op, Sample, all_ops, get_op
from pelton.kernels import native
from pelton.kernels.compile_c import build_folder, compile_c
from pelton.kernels.conformance import Case, ConformanceError, check
from pelton.kernels.conformance import node_spec as sample_spec
from pelton.kernels.cpu_levels import ANY
from pelton.kernels.tactic import Tactic
from pelton.kernels.user_tactic import REFERENCE

#: Where an engine has its compiled code.
COMPILED = "compiled"
#: Sizes of dynamic dimensions in samples: a decode step, and a small prefill.
_SIZES = ({"T": 1, "B": 1, "B+1": 2, "N": 1}, {"T": 7, "B": 3, "B+1": 4, "N": 5})


def load_plugins() -> None:
    """Import what installed packages offer for Pelton's ops, and for the ops that are registered so far
    (a model's module has imported its own). Raises ``ConfigError`` naming a broken package."""
    namespaces = {name.partition("::")[0] for name in all_ops() if "::" in name}
    for namespace in (NAMESPACE, *sorted(namespaces)):
        plugins.load("pelton.ops", namespace)


def usable(
    program: Program,
    quants: Mapping[Root, str],
    tactics: Mapping[str, Tactic],
    activations: str,
    cpu_level: str,
    wanted: Mapping[str, str],
) -> tuple[dict[str, Tactic], list[str]]:
    """Those of ``tactics`` that may run ``program``, and a sentence for each that may not.

    ``wanted``: tactic by op, as the user chose. Raises ``BuildError`` where one of those may not.
    """
    outside = [t for t in tactics.values() if t.kind != "native" and t.device == "cpu"]
    kept, notes = dict(tactics), []
    for tactic in outside:
        calls = [c for c in program.calls if c.op.name == tactic.op]
        why = _why_not(tactic, calls, quants, activations, cpu_level) if calls else None
        if why is None:
            continue
        if tactic.name in wanted.values():
            raise BuildError(f"the tactic {tactic.name} cannot be used: {why}")
        del kept[tactic.name]
        notes.append(f"the tactic {tactic.name} of {tactic.op} is not used: {why}")
    return kept, notes


def _why_not(
    tactic: Tactic, calls: Sequence[Call], quants: Mapping[Root, str], activations: str, cpu_level: str
) -> str | None:
    """What is wrong with the tactic's results for ``calls``; None: nothing."""
    op, seen = get_op(tactic.op), set()
    if not native.available():
        return "tactics from outside run on the native library only, and it is not installed"
    # Compiled for another CPU, it is checked as this one can run it.
    here = cpu_level == ANY or native.has_level(cpu_level)
    level = cpu_level if here else native.cpu_level()
    try:
        if tactic.kind == "library":
            compile_c(tactic.source, build_folder(), cpu_level=cpu_level, label=tactic.name)
        samples = [s for s in op.samples(torch.Generator().manual_seed(0)) if _supports(tactic, op, s)]
        for call in calls:
            spec = node_spec(call, quants, activations)
            if tactic.supports(spec) and str(spec) not in seen:
                seen.add(str(spec))
                samples += _derived(op, call, spec.inputs, bool(samples))
        with native.Team(2) as team:
            for sample in samples:
                check(Case(op, sample, tactic, level), team)
    except (ConformanceError, BuildError, MissingDependencyError) as error:
        return str(error)
    return None


def _supports(tactic: Tactic, op: Op, sample: Sample) -> bool:
    return tactic.supports(sample_spec(op, sample, tactic.precision))


def _derived(op: Op, call: Call, specs: Sequence[object], has_samples: bool) -> Iterator[Sample]:
    """Random operands of the call's own shapes and strides."""
    integers = [v for v in call.inputs if v is not None and not v.root.dtype.startswith(("float", "bfloat"))]
    if integers:
        if not has_samples:
            raise BuildError(
                f"{op.name} takes integers ({integers[0].name}), whose range only its author knows: "
                "give @pelton.op samples="
            )
        return
    generator = torch.Generator().manual_seed(1)
    for sizes in _SIZES:
        tensors: list[torch.Tensor | None] = []
        for value, spec in zip(call.inputs, specs, strict=True):
            if value is None or spec is None:
                tensors.append(None)
                continue
            shape = [sizes.get(d, 5) if isinstance(d, str) else d for d in value.shape]
            extent = 1 + sum((n - 1) * s for n, s in zip(shape, value.strides, strict=True))
            flat = torch.randn(extent, generator=generator).to(getattr(torch, spec.dtype))  # type: ignore[attr-defined]
            tensors.append(flat.as_strided(shape, value.strides))
        rest = iter(tensors)
        args = tuple(
            next(rest) if "Tensor" in str(a.type) else call.attrs.get(a.name, a.default_value)
            for a in op.torch_op._schema.arguments
        )
        yield Sample(args=args, name=f"{call.name} with {sizes['T']} tokens")


def notes_on(plan: Plan) -> list[str]:
    """What the user must know of the tactics from outside that ``plan`` uses."""
    notes = []
    for name, tactic in plan.external.items():
        if name.endswith(REFERENCE):
            op = name.removesuffix(REFERENCE)
            calls = sum(i.op == op for i in plan.instructions)
            notes.append(
                f"{op} has no tactic for a CPU: its reference in PyTorch ({tactic.function}) runs its "
                f"{calls} calls in every step, and the engine needs torch and that module"
            )
    return notes


def with_extensions(plan: Plan, tactics: Mapping[str, Tactic], cpu_level: str) -> Plan:
    """``plan`` with a description of the tactics and ops from outside that it uses."""
    names = sorted({c.tactic for i in plan.instructions for c in i.tactics})
    outside = {n: tactics[n] for n in names if tactics[n].kind in ("python", "library")}
    ops = sorted({i.op for i in plan.instructions if "::" in i.op})
    return msgspec.structs.replace(
        plan,
        external={name: describe(t, cpu_level, f"{COMPILED}/") for name, t in outside.items()},
        op_modules={op: get_op(op).reference.__module__ for op in ops},
    )


def write_compiled(plan: Plan, folder: Path) -> None:
    """Put the C libraries that ``plan`` names into the engine."""
    for name in sorted({t.file for t in plan.external.values() if t.file}):
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((build_folder() / target.name).read_bytes())
