"""The plan of a program whose tactics are chosen by their default order, for float32 weights."""

from __future__ import annotations

from collections.abc import Mapping

from pelton.builder.calls import Program
from pelton.builder.lower import lower
from pelton.builder.measure import Measurements
from pelton.builder.profiles import Bucket
from pelton.builder.signature import signature_of
from pelton.builder.tactics import choose
from pelton.engine.plan import Plan
from pelton.kernels.tactic import all_tactics


def untimed_plan(program: Program, dims: Mapping[str, int]) -> Plan:
    """``dims``: largest T, B and N."""
    roots = {v.root for call in program.calls for v in call.inputs if v is not None}
    quants = {r: "float32" for r in roots if r.source and r.source.kind in ("weight", "constant")}
    choice = choose(
        program.calls,
        quants,
        {name: t for name, t in all_tactics().items() if t.device == "cpu"},
        "float32",
        buckets=(Bucket(max_tokens=dims["T"], dims=dims),),
        signature_of=lambda call, spec, bucket: signature_of(
            call, spec, bucket, context=16, threads=1, reuse_bytes=1
        ),
        measure=Measurements(None),
    )
    return lower(program, choice, quants, dims)
