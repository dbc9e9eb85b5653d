"""What a plan says of a tactic from outside Pelton."""

from __future__ import annotations

from pelton import plugins
from pelton.engine.plan import ExternalTactic
from pelton.ir.op import get_op
from pelton.kernels.compile_c import build_folder, compile_c
from pelton.kernels.tactic import Tactic


def describe(tactic: Tactic, cpu_level: str, prefix: str | None = None) -> ExternalTactic:
    """``prefix``: of the engine's compiled code; by default the library is where it was compiled.

    C source is compiled for ``cpu_level``, unless that has been done. Raises as ``compile_c``.
    """
    if tactic.kind == "library":
        path = compile_c(tactic.source, build_folder(), cpu_level=cpu_level, label=tactic.name)
        file = str(path) if prefix is None else prefix + path.name
        return ExternalTactic(kind="library", function=tactic.function, file=file)
    assert tactic.implementation is not None
    package, version = plugins.package_of(tactic.implementation)
    arguments = get_op(tactic.op).torch_op._schema.arguments
    return ExternalTactic(
        kind="python",
        function=tactic.function,
        tensors=tuple(a.name for a in arguments if "Tensor" in str(a.type)),
        package=package,
        version=version,
    )
