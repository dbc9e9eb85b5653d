"""The user's choice of tactics: ``BuildConfig.plugins``, op -> ``auto``, a tactic's name, or ``disable``.

An explicit choice wins over the automatic one. What cannot be kept is refused; what contradicts another
setting but can be kept is, with a sentence.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pelton.errors import ConfigError
from pelton.kernels.tactic import NodeSpec, Tactic

AUTO, DISABLE = "auto", "disable"

#: Op -> what the user wants for it.
PluginConfig = Mapping[str, str]

#: Ops that passes make out of others. Where the user chose a tactic for one of those, its calls stay.
MADE_FROM = {
    "linear_q8": ("linear",),
    "linear_gated": ("linear", "gated_activation"),
    "linear_gated_q8": ("linear", "gated_activation", "linear_gated"),
    "linear_add": ("linear", "add"),
    "norm_linear": ("rms_norm", "linear"),
    "norm_linear_gated": ("rms_norm", "linear", "gated_activation", "linear_gated"),
    "add_rms_norm": ("add", "rms_norm"),
    "rms_norm_q8": ("rms_norm",),
    "add_rms_norm_q8": ("add", "rms_norm", "add_rms_norm"),
    "rope_kv_write": ("rope", "kv_write"),
    "rope_paged_attention": ("rope", "kv_write", "rope_kv_write", "paged_attention"),
}


def keeps_apart(plugins: PluginConfig, op: str) -> bool:
    """Whether ``op`` would take calls from an op whose tactic the user chose."""
    return any(plugins.get(part, AUTO) != AUTO for part in MADE_FROM.get(op, ()))


@dataclass(frozen=True, kw_only=True)
class Plugged:
    """Candidates after the user's choice."""

    options: list[list[Tactic]]
    """Of each call."""
    chosen: frozenset[int]
    """Calls whose tactic the user chose."""
    notes: tuple[str, ...]


def apply_plugins(
    plugins: PluginConfig,
    specs: Sequence[NodeSpec],
    supporting: Sequence[Sequence[Tactic]],
    known: Mapping[str, Tactic],
    target: Collection[str],
) -> Plugged:
    """``supporting``: each call's candidates; ``known``: all tactics by name, of which the target can run
    those named ``target``. Raises ``ConfigError``."""
    options = [list(candidates) for candidates in supporting]
    chosen: set[int] = set()
    notes: list[str] = []
    for op, wanted in plugins.items():
        _check_names(op, wanted, specs, known)
        mine = [i for i, spec in enumerate(specs) if spec.op == op]
        if not mine:
            notes.append(f"plugin {op}={wanted} has no effect: the compiled model has no {op}")
        if wanted == AUTO or not mine:
            continue
        if wanted == DISABLE:
            notes.append(
                f"{op} is disabled, so its {len(mine)} calls, and with them the whole engine, run on the "
                "PyTorch reference: many times slower, and only where torch is installed"
            )
            chosen.update(mine)
            for i in mine:
                options[i] = []
            continue
        tactic = known[wanted]
        if wanted not in target and tactic.sums == "float16":
            raise ConfigError(f"plugin {op}={wanted} adds in float16; set accumulate float16 for it, too")
        if wanted not in target:
            raise ConfigError(
                f"plugin {op}={wanted} is for another device or CPU level than the build's target; choose "
                "another tactic or cpu_level"
            )
        kept = [i for i in mine if tactic in options[i]]
        if not kept:
            raise ConfigError(f"plugin {op}={wanted} cannot be kept: {_why_not(tactic, specs[mine[0]])}")
        for i in kept:
            options[i] = [tactic]
        chosen.update(kept)
        others = [i for i in mine if i not in kept]
        if others:
            notes.append(
                f"{wanted} runs {len(kept)} of {len(mine)} {op} calls, as plugins asks; the others stay "
                f"automatic: {_why_not(tactic, specs[others[0]])}"
            )
        asked = specs[kept[0]].activations
        if tactic.precision == "float32" and asked == "int8" and _has_int8(op, known):
            notes.append(
                f"activations are int8, but plugin {op}={wanted} computes in float32; the plugin, being "
                "explicit, wins"
            )
    return Plugged(options=options, chosen=frozenset(chosen), notes=tuple(notes))


def _check_names(op: str, wanted: str, specs: Sequence[NodeSpec], known: Mapping[str, Tactic]) -> None:
    ops = sorted({t.op for t in known.values()} | {spec.op for spec in specs})
    if op not in ops:
        raise ConfigError(
            f"plugin {op}={wanted}: there is no op {op!r}{_near(op, ops)} (ops: {', '.join(ops)})"
        )
    if wanted in (AUTO, DISABLE):
        return
    mine = sorted(t.name for t in known.values() if t.op == op)
    if wanted in known and known[wanted].op != op:
        raise ConfigError(f"plugin {op}={wanted}: {wanted} is a tactic of {known[wanted].op}, not of {op}")
    if wanted not in known:
        raise ConfigError(
            f"plugin {op}={wanted}: {op} has no such tactic{_near(wanted, mine)} "
            f"(known: {', '.join((AUTO, DISABLE, *mine))})"
        )


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _has_int8(op: str, known: Mapping[str, Tactic]) -> bool:
    return any(t.op == op and t.precision == "int8" for t in known.values())


def _why_not(tactic: Tactic, spec: NodeSpec) -> str:
    other = "float32" if spec.activations == "int8" else "int8"
    if tactic.supports(replace(spec, activations=other)):
        return f"{tactic.name} needs activations {other}, and this build has {spec.activations}"
    operands = ", ".join(
        "none" if t is None else f"{t.quant or t.dtype} [{', '.join(map(str, t.shape))}]" for t in spec.inputs
    )
    return f"{tactic.name} does not support {spec.op}({operands})"
