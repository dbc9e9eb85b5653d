"""The arena planner: nothing alive at once overlaps, and the arena is close to the lower bound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.builder.memory import Lifetime, lower_bound, plan_arena

LIFETIMES = st.lists(
    st.builds(
        lambda nbytes, first, length: Lifetime(nbytes, first, first + length),
        st.integers(1, 5000),
        st.integers(0, 30),
        st.integers(0, 8),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(LIFETIMES)
def test_buffers_alive_together_never_share_bytes(buffers: list[Lifetime]) -> None:
    offsets, total = plan_arena(buffers)
    for i, a in enumerate(buffers):
        assert offsets[i] % 64 == 0
        assert offsets[i] + a.nbytes <= total
        for j, b in enumerate(buffers[:i]):
            apart = offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i]
            assert apart or not a.overlaps(b)
    assert total >= lower_bound(buffers)


def test_a_chain_needs_two_buffers() -> None:
    chain = [Lifetime(1000, i, i + 1) for i in range(10)]
    assert plan_arena(chain)[1] == lower_bound(chain) == 2048


def test_an_output_never_takes_the_place_of_an_input_of_its_instruction() -> None:
    offsets, _ = plan_arena([Lifetime(64, 0, 1), Lifetime(64, 1, 2)])
    assert offsets[0] != offsets[1]


def test_nothing_needs_nothing() -> None:
    assert plan_arena([]) == ([], 0)
