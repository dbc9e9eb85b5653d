"""Choosing tactics: a function of times, and the user's word. A fake timer says what calls cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from pelton.builder.calls import Call, Root, Value
from pelton.builder.measure import Measurements
from pelton.builder.profiles import Bucket
from pelton.builder.signature import Signature, signature_of
from pelton.builder.tactic_report import tactic_reports
from pelton.builder.tactics import Choice, choose
from pelton.builder.timing_cache import Entry
from pelton.errors import ConfigError
from pelton.ir.op import get_op
from pelton.ir.types import GraphInput
from pelton.kernels.tactic import Tactic

BUCKETS = tuple(Bucket(max_tokens=n, dims={"T": n, "B": 1, "N": 1}) for n in (1, 8, 64))


def tactic(name: str, op: str = "linear", layout: str = "rows", priority: int = 0, **rest: object) -> Tactic:
    return Tactic(
        name=name, op=op, supports=rest.pop("supports", lambda node: True), priority=priority,
        weight_layouts={1: layout}, **rest,
    )  # fmt: skip


class FakeTimer:
    """``cost(tactic, rows of the input)`` in microseconds; remembers what it was asked."""

    def __init__(self, cost: Callable[[str, int], float], wrong: Mapping[str, str] | None = None) -> None:
        self.cost, self.wrong = cost, dict(wrong or {})
        self.asked: list[tuple[str, int]] = []

    def check(self, signature: Signature, tactic: Tactic) -> str | None:
        return self.wrong.get(tactic.name)

    def time(self, signature: Signature, tactics: Sequence[Tactic]) -> dict[str, float]:
        rows = rows_of(signature)
        self.asked += [(t.name, rows) for t in tactics]
        return {t.name: self.cost(t.name, rows) for t in tactics}


def rows_of(signature: Signature) -> int:
    first = signature.inputs[0]
    assert first is not None
    return first.shape[0]


def weight(name: str = "w", shape: tuple[int, int] = (64, 32)) -> Value:
    root = Root(name, "float32", shape, GraphInput(kind="weight", name=name))
    return Value(name, root, shape, (shape[1], 1), 0)


def linear(name: str, w: Value, dim: str = "T") -> Call:
    def value(suffix: str, cols: int) -> Value:
        root = Root(name + suffix, "float32", (dim, cols))
        return Value(name + suffix, root, (dim, cols), (cols, 1), 0)

    return Call(get_op("linear"), name, (value(".x", 32), w, None), (value("", 64),))


def embedding(name: str, w: Value) -> Call:
    ids = Root("input_ids", "int32", ("T",), GraphInput(kind="input", name="input_ids"))
    out = Root(name, "float32", ("T", 32))
    inputs = (Value("input_ids", ids, ("T",), (1,), 0), w)
    return Call(get_op("embedding"), name, inputs, (Value(name, out, ("T", 32), (32, 1), 0),))


def run(
    calls: Sequence[Call],
    tactics: Sequence[Tactic],
    measure: Measurements,
    plugins: Mapping[str, str] | None = None,
    activations: str = "float32",
    known: Sequence[Tactic] = (),
) -> Choice:
    roots = {v.root for c in calls for v in c.inputs if v is not None and v.root.is_weight}
    return choose(
        calls,
        dict.fromkeys(sorted(roots, key=lambda r: r.name), "float32"),
        {t.name: t for t in tactics},
        activations,
        buckets=BUCKETS,
        signature_of=lambda call, spec, bucket: signature_of(
            call, spec, bucket, context=64, threads=1, reuse_bytes=1 << 20
        ),
        measure=measure,
        plugins=plugins,
        known={t.name: t for t in (*tactics, *known)},
    )


def tables(choice: Choice) -> list[list[tuple[int, str]]]:
    return [[(n, t.name) for n, t in table] for table in choice.tables]


# ---- Tables by bucket ----

SMALL, LARGE = tactic("small", priority=1), tactic("large", priority=2)


def crossing(name: str, rows: int) -> float:
    """``small`` is faster below 8 rows, ``large`` from there on."""
    return rows * 10.0 if name == "small" else 50.0 + rows


def test_each_bucket_takes_its_fastest_tactic_and_equal_neighbours_merge() -> None:
    timer = FakeTimer(crossing)
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(timer))
    assert tables(choice) == [[(1, "small"), (64, "large")]]
    assert [d.reason for d in choice.decisions[0]] == ["timed"] * 3
    assert choice.candidates == 6


def test_calls_alike_are_timed_once() -> None:
    timer = FakeTimer(crossing)
    calls = [linear(f"layers.{i}", weight(f"w{i}")) for i in range(5)]
    measure = Measurements(timer)
    choice = run(calls, [SMALL, LARGE], measure)
    assert sorted(timer.asked) == sorted((t, n) for t in ("small", "large") for n in (1, 8, 64))
    assert measure.timed == 6
    assert choice.candidates == 6
    assert len(set(map(str, tables(choice)))) == 1


def test_calls_on_logits_rows_are_timed_at_their_number_whatever_the_tokens() -> None:
    timer = FakeTimer(crossing)
    choice = run([linear("head", weight(), dim="N")], [SMALL, LARGE], Measurements(timer))
    assert {rows for _, rows in timer.asked} == {1}
    assert tables(choice) == [[(64, "small")]]


def test_without_a_choice_nothing_is_timed() -> None:
    timer = FakeTimer(crossing)
    choice = run([linear("a", weight())], [LARGE], Measurements(timer))
    assert timer.asked == []
    assert tables(choice) == [[(64, "large")]]
    assert choice.decisions[0][0].reason == "default"


def test_without_timing_priority_decides() -> None:
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(None))
    assert tables(choice) == [[(64, "large")]]
    assert choice.notes == ()


def test_of_equal_priority_what_is_made_for_the_smallest_steps_is_taken() -> None:
    """Whatever they are called."""
    sized = [tactic(f"of{n}", largest_tokens=n, priority=1) for n in (64, 8, 1)]
    choice = run([linear("a", weight())], [*sized, tactic("any", priority=1)], Measurements(None))
    assert tables(choice) == [[(1, "of1"), (8, "of8"), (64, "of64")]]


@pytest.mark.parametrize(("small", "expected"), [(99.0, "large"), (98.0, "large"), (90.0, "small")])
def test_near_equal_times_are_equal_and_the_priority_wins(small: float, expected: str) -> None:
    timer = FakeTimer(lambda name, rows: small if name == "small" else 100.0)
    assert tables(run([linear("a", weight())], [SMALL, LARGE], Measurements(timer))) == [[(64, expected)]]


# ---- Layouts ----

PACKED = tactic("packed", layout="x16", priority=1)
PLAIN = tactic("plain", priority=2)


@pytest.mark.parametrize(
    ("cost", "layout"),
    [
        # Twice as fast in one bucket, a tenth slower in two.
        (lambda name, rows: {"packed": 1.0, "plain": 2.0 if rows == 1 else 0.9}[name] * rows, "x16"),
        # Much slower in the largest: buckets weigh the same, so what the small ones gain is lost.
        (lambda name, rows: {"packed": 9.0 if rows == 64 else 1.0, "plain": 1.2}[name] * rows, "rows"),
    ],
)
def test_a_weights_layout_is_the_best_over_all_buckets(
    cost: Callable[[str, int], float], layout: str
) -> None:
    w = weight()
    choice = run([linear("a", w)], [PACKED, PLAIN], Measurements(FakeTimer(cost)))
    assert choice.layouts[w.root] == layout
    assert {t.weight_layouts[1] for _, t in choice.tables[0]} == {layout}
    other = {"x16": "plain", "rows": "packed"}[layout]
    assert choice.decisions[0][0].rejected == {
        other: "another layout of the weight was chosen for all buckets"
    }


def test_a_tied_weight_takes_the_layout_that_suits_both_users_together() -> None:
    w = weight()
    tactics = [
        PACKED,
        PLAIN,
        tactic("gather.rows", op="embedding", priority=2),
        tactic("gather.x16", op="embedding", layout="x16", priority=1),
    ]
    times = {"packed": 10.0, "plain": 20.0, "gather.rows": 1.0, "gather.x16": 4.0}
    calls = [embedding("embed", w), linear("head", w, dim="N")]
    choice = run(calls, tactics, Measurements(FakeTimer(lambda name, rows: times[name])))
    assert choice.layouts[w.root] == "x16"  # 14 against 21, although the embedding alone prefers rows
    assert tables(choice) == [[(64, "gather.x16")], [(64, "packed")]]


def test_a_layout_that_another_user_cannot_read_is_no_candidate() -> None:
    w = weight()
    tactics = [PACKED, tactic("gather.rows", op="embedding", priority=2)]
    tactics.append(tactic("gather.x16", op="embedding", layout="x16", priority=1))
    timer = FakeTimer(crossing)
    choice = run([embedding("embed", w), linear("head", w)], tactics, Measurements(timer))
    assert timer.asked == []
    assert tables(choice) == [[(64, "gather.x16")], [(64, "packed")]]
    assert choice.decisions[0][0].rejected == {
        "gather.rows": "wants w as rows, for which linear of the same weight has no tactic"
    }


# ---- Wrong tactics, cache, budget ----


def test_a_wrong_tactic_is_dropped_loudly_and_everywhere() -> None:
    timer = FakeTimer(lambda name, rows: 1.0 if name == "small" else 9.0, wrong={"small": "error 0.5"})
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(timer))
    assert tables(choice) == [[(64, "large")]]
    assert choice.notes == ("small computes linear wrongly and is not used: error 0.5",)
    assert choice.decisions[0][0].rejected == {"small": "computes wrongly"}
    assert ("small", 1) not in timer.asked


def test_the_cache_answers_instead_of_the_machine() -> None:
    first = Measurements(FakeTimer(crossing))
    expected = run([linear("a", weight())], [SMALL, LARGE], first)
    again = FakeTimer(lambda name, rows: 1.0)
    second = Measurements(again, first.used)
    choice = run([linear("a", weight())], [SMALL, LARGE], second)
    assert again.asked == []
    assert (second.timed, second.cached) == (0, 6)
    assert tables(choice) == tables(expected)
    assert tactic_reports(choice) == tactic_reports(expected)
    assert second.used == first.used


def test_cached_times_are_used_where_nothing_may_be_measured() -> None:
    first = Measurements(FakeTimer(crossing))
    run([linear("a", weight())], [SMALL, LARGE], first)
    known = {key: entry for key, entry in first.used.items() if "[8," not in key}
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(None, known))
    assert [d.reason for d in choice.decisions[0]] == ["timed", "default", "timed"]


def test_an_entry_without_a_new_tactic_is_measured_again_as_a_whole() -> None:
    first = Measurements(FakeTimer(crossing))
    run([linear("a", weight())], [SMALL, LARGE], first)
    timer = FakeTimer(lambda name, rows: 1.0 if name == "new" else 100.0)
    measure = Measurements(timer, first.used)
    choice = run([linear("a", weight())], [SMALL, LARGE, tactic("new")], measure)
    assert tables(choice) == [[(64, "new")]]
    assert (measure.timed, measure.cached) == (9, 0)


def test_a_tactic_from_outside_is_measured_again_when_its_source_changes() -> None:
    def outside(source: str) -> Tactic:
        return tactic("outside", kind="library", source=source)

    first = Measurements(FakeTimer(crossing))
    run([linear("a", weight())], [SMALL, outside("v1")], first)
    same = Measurements(FakeTimer(crossing), first.used)
    run([linear("a", weight())], [SMALL, outside("v1")], same)
    changed = Measurements(FakeTimer(crossing), first.used)
    run([linear("a", weight())], [SMALL, outside("v2")], changed)
    assert (same.timed, changed.timed) == (0, 6)


def test_a_cached_wrong_tactic_stays_dropped() -> None:
    first = Measurements(FakeTimer(crossing, wrong={"small": "error 0.5"}))
    run([linear("a", weight())], [SMALL, LARGE], first)
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(FakeTimer(crossing), first.used))
    assert tables(choice) == [[(64, "large")]]
    assert choice.notes == ("small computes linear wrongly and is not used: as the timing cache says",)


def test_measuring_stops_when_its_time_is_up_and_says_so() -> None:
    now = iter(range(0, 1000, 20))
    measure = Measurements(FakeTimer(crossing), budget=25.0, clock=lambda: float(next(now)))
    choice = run([linear("a", weight())], [SMALL, LARGE], measure)
    assert [d.reason for d in choice.decisions[0]] == ["timed", "timed", "default"]
    assert choice.notes[0].startswith("1 calls were not timed within 25 s and take their default tactic")


def test_the_layout_goes_by_priority_when_a_bucket_is_unknown() -> None:
    w = weight()
    entries: dict[str, Entry] = {}
    measure = Measurements(FakeTimer(lambda name, rows: 1.0 if name == "packed" else 5.0))
    run([linear("a", w)], [PACKED, PLAIN], measure)
    entries = {key: entry for key, entry in measure.used.items() if "[64," not in key}
    choice = run([linear("a", w)], [PACKED, PLAIN], Measurements(None, entries))
    assert choice.layouts[w.root] == "rows"


# ---- The user's choice ----


def test_a_named_tactic_wins_over_a_faster_one() -> None:
    timer = FakeTimer(crossing)
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(timer), {"linear": "small"})
    assert tables(choice) == [[(64, "small")]]
    assert timer.asked == []
    assert choice.decisions[0][0].reason == "user"


def test_auto_changes_nothing() -> None:
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(None), {"linear": "auto"})
    assert tables(choice) == [[(64, "large")]]
    assert choice.decisions[0][0].reason == "default"


def test_disable_leaves_the_reference_and_says_what_that_costs() -> None:
    choice = run([linear("a", weight())], [SMALL, LARGE], Measurements(None), {"linear": "disable"})
    assert choice.tables == ((),)
    assert "linear is disabled, so its 1 calls, and with them the whole engine, run on the" in choice.notes[0]


def test_a_tactic_for_some_calls_leaves_the_others_automatic_with_the_reason() -> None:
    narrow = tactic("narrow", supports=lambda node: node.inputs[1].shape[0] == 64)
    calls = [linear("a", weight()), linear("b", weight("v", (128, 32)))]
    choice = run(calls, [narrow, LARGE], Measurements(None), {"linear": "narrow"})
    assert tables(choice) == [[(64, "narrow")], [(64, "large")]]
    assert choice.notes == (
        "narrow runs 1 of 2 linear calls, as plugins asks; the others stay automatic: "
        "narrow does not support linear(float32 [T, 32], float32 [128, 32], none)",
    )


def test_an_explicit_float32_tactic_overrides_int8_activations_with_a_sentence() -> None:
    int8 = tactic("int8", precision="int8", priority=3)
    choice = run([linear("a", weight())], [int8, SMALL], Measurements(None), {"linear": "small"}, "int8")
    assert tables(choice) == [[(64, "small")]]
    assert "activations are int8, but plugin linear=small computes in float32" in choice.notes[0]


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ({"linaer": "auto"}, r"there is no op 'linaer'; did you mean linear\? \(ops: "),
        ({"linear": "smal"}, r"linear has no such tactic; did you mean small\? \(known: auto, disable, "),
        ({"linear": "gather.rows"}, r"gather\.rows is a tactic of embedding, not of linear"),
        ({"linear": "int8"}, r"cannot be kept: int8 needs activations int8, and this build has float32"),
        (
            {"linear": "never"},
            r"never does not support linear\(float32 \[T, 32\], float32 \[64, 32\], none\)",
        ),
        ({"linear": "amx"}, r"amx is for another device or CPU level than the build's target"),
        ({"embedding": "gather.rows"}, r"cannot be kept: it wants w as rows, for which linear of the same"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(plugins: dict[str, str], message: str) -> None:
    w = weight()
    tactics = [
        tactic("small", layout="x16"),
        tactic("int8", layout="x16", supports=lambda node: node.activations == "int8"),
        tactic("never", supports=lambda node: False),
        tactic("gather.rows", op="embedding"),
        tactic("gather.x16", op="embedding", layout="x16"),
    ]
    calls = [embedding("embed", w), linear("head", w)]
    with pytest.raises(ConfigError, match=message):
        run(calls, tactics, Measurements(None), plugins, known=[tactic("amx")])


def test_a_plugin_for_an_op_that_the_model_lacks_is_not_silent() -> None:
    choice = run(
        [linear("a", weight())],
        [SMALL, tactic("soft", op="softcap")],
        Measurements(None),
        {"softcap": "soft"},
    )
    assert choice.notes == ("plugin softcap=soft has no effect: the compiled model has no softcap",)


# ---- Report ----


def test_the_report_has_a_row_per_bucket_with_all_times() -> None:
    calls = [linear(f"layers.{i}", weight(f"w{i}")) for i in range(3)]
    rows = tactic_reports(run(calls, [SMALL, LARGE], Measurements(FakeTimer(crossing))))
    assert [(r.shape, r.max_tokens, r.calls, r.tactic) for r in rows] == [
        ("1x32 64x32", 1, 3, "small"),
        ("8x32 64x32", 8, 3, "large"),
        ("64x32 64x32", 64, 3, "large"),
    ]
    assert rows[0].microseconds == {"small": 10.0, "large": 51.0}
