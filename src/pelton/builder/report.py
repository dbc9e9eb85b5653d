"""What a build did: ``report.json``, and the same for people."""

from __future__ import annotations

import msgspec

from pelton.engine.resources import human_bytes


class PassReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pass: how often it matched and changed, and why it did not elsewhere."""

    name: str
    matched: int
    changed: int
    skipped: dict[str, int] = {}
    """Reason -> how often."""
    choice: str = "auto"
    """What the user wanted: auto, force or off."""
    note: str = ""
    """Why the pass did not run at all; empty when it ran."""
    diff: str = ""
    """What it changed in the graph or in the weights' recipes; layers that change alike stand once."""


class TacticReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many calls of an op a tactic runs; an empty ``tactic``: only the reference runs them."""

    op: str
    tactic: str
    calls: int
    shape: str = ""
    """Of the tensors, at the sizes that were timed."""
    max_tokens: int = 0
    """The bucket: steps of at most so many tokens; 0: every step."""
    reason: str = "default"
    """Why this one: default (priority), timed (now or in the timing cache) or user."""
    microseconds: dict[str, float] = {}
    """Measured time of one call by tactic, this one and those it was timed against."""
    rejected: dict[str, str] = {}
    """Tactics that support the call and were not taken without timing -> why."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The engine on text beside the unquantised model: dequantised weights, float32, exact activations."""

    text: str
    """Its name."""
    tokens: int
    kl_mean: float
    """KL(unquantised || engine) per token, nats."""
    kl_max: float
    top1_agreement: float
    perplexity: float
    perplexity_unquantised: float
    gate: str
    """What was required; empty: nothing."""


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine against the eager reference model, on text."""

    runner: str
    """What computed the engine's side: native or reference."""
    positions: int
    """Rows of logits compared."""
    max_error: float
    """Largest difference over the reference's largest logit."""
    kl_mean: float
    """KL(reference || engine) per position, nats."""
    kl_max: float
    top1_agreement: float
    """Share of positions whose most likely token is the same."""
    bound: str
    """What the build required, such as ``max_error <= 1e-4``."""
    evaluation: Evaluation | None = None
    """On text, where the build was asked for it."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes the engine needs wherever it runs."""

    weights: int
    work: int
    """Arena and workspace of the largest step."""
    arena_lower_bound: int
    """Most bytes alive at once: no arena can be smaller."""


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this build was like on its machine: told to the user, never stored, so that two builds of
    the same thing are the same bytes."""

    engine: str
    """Name of the engine's directory."""
    engine_bytes: int
    kv: int
    """Bytes of the KV cache that a session here would make."""
    kv_tokens: int
    free: int | None
    """Bytes that a session may take; None: the engine's GPU is not here."""
    longest_context: int
    timed: int = 0
    """Tactics that this build timed."""
    cached: int = 0
    """Tactics whose times the timing cache had."""
    peak_build: int
    """Peak anonymous memory of the building process, Python and torch included; 0: unknown."""
    notes: tuple[str, ...] = ()
    """What was said of this machine, such as memory that limits the KV cache."""
    seconds: dict[str, float]
    """By stage."""
    expected_seconds: float = 0.0
    """Of a dry run: about how long the build takes; 0: this was a build."""


class BuildReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a build did. Without ``machine`` it is the whole of ``report.json``."""

    checkpoint: str
    architecture: str
    num_parameters: int
    checkpoint_quants: dict[str, int]
    """Values of each type in the checkpoint."""
    checkpoint_bytes: int
    stored: dict[str, int]
    """Bytes of the engine's weights by type."""
    memory: MemoryReport
    passes: tuple[PassReport, ...]
    tactics: tuple[TacticReport, ...]
    candidates: int
    quality: QualityReport | None
    """None: the check was switched off."""
    notes: tuple[str, ...]
    """Automatic choices and everything that was changed, one sentence each."""
    machine: MachineReport | None = None

    def text(self) -> str:
        """The report as the command line prints it."""
        rows = [
            ("checkpoint", self._checkpoint()),
            ("memory", self._memory()),
            ("passes", self._passes()),
            ("tactics", self._tactics()),
            ("quality", self._quality()),
        ]
        lines = [f"  {name:<11} {text}" for name, text in rows if text]
        machine = self.machine
        notes = self.notes + (machine.notes if machine else ())
        lines += [f"  note        {note}" for note in notes]
        if machine:
            size = human_bytes(machine.engine_bytes)
        if machine and machine.expected_seconds:
            about = max(10, round(machine.expected_seconds, -1))
            lines.append(f"  {machine.engine}  would be {size}, in about {about:.0f} s; nothing was written")
        elif machine:
            lines.append(f"  {machine.engine}  {size} in {sum(machine.seconds.values()):.1f} s")
        return "\n".join(lines)

    def stored_json(self) -> bytes:
        """``report.json``: everything but the machine."""
        kept = msgspec.structs.replace(self, machine=None)
        return msgspec.json.format(msgspec.json.encode(kept), indent=1)

    def _checkpoint(self) -> str:
        total = max(1, sum(self.checkpoint_quants.values()))
        by_size = sorted(self.checkpoint_quants.items(), key=lambda item: -item[1])
        quants = "+".join(q for q, n in by_size if n * 100 >= total)
        return "  ".join(
            (
                self.checkpoint,
                f"{human_count(self.num_parameters)} parameters, {quants}, "
                f"{human_bytes(self.checkpoint_bytes)}",
            )
        )

    def _memory(self) -> str:
        text, here = f"weights {human_bytes(self.memory.weights)}", self.machine
        if here:
            text += f"  KV {human_bytes(here.kv)} ({here.kv_tokens} tokens)"
        text += f"  work {human_bytes(self.memory.work)}"
        if here:
            text += "" if here.free is None else f"  of {human_bytes(here.free)} free"
            text += f"     peak host {human_bytes(here.peak_build)}" if here.peak_build else ""
        return text

    def _passes(self) -> str:
        """What changed, and how many places did not: most reasons are the normal case, and all are kept."""
        parts, left = [], []
        for p in self.passes:
            if p.changed:
                parts.append(f"{p.name} {p.changed}")
            if p.choice == "off":
                parts.append(f"{p.name} off")
            if p.skipped:
                left.append(f"{p.name} {sum(p.skipped.values())}")
        text = "  ".join(parts) or "none applied"
        return f"{text}; left alone: {', '.join(left)} (--explain says why)" if left else text

    def _tactics(self) -> str:
        ops = len({t.op for t in self.tactics})
        missing = sorted({t.op for t in self.tactics if not t.tactic})
        text = f"{ops} ops, {self.candidates} candidates"
        if self.machine:
            text += f", {self.machine.timed} timed, {self.machine.cached} from cache"
        return text + (f"; no native kernel for {', '.join(missing)}" if missing else "")

    def _quality(self) -> str:
        q = self.quality
        if q is None:
            return "" if self.machine and self.machine.expected_seconds else "not checked"
        if e := q.evaluation:
            return (
                f"top-1 agreement {e.top1_agreement:.1%}, KL {e.kl_mean:.2g}, perplexity {e.perplexity:.2f} "
                f"({e.perplexity_unquantised:.2f} unquantised) over {e.tokens} tokens of {e.text}"
            )
        return (
            f"top-1 agreement {q.top1_agreement:.1%}, KL {q.kl_mean:.2g} (max {q.kl_max:.2g}), "
            f"largest error {q.max_error:.1g} over {q.positions} positions"
        )


def human_count(n: float) -> str:
    """``n`` for people: "8.03 B", "135 M"."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= limit:
            value = n / limit
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.3g} {unit}"
    return f"{n:.0f}"
