"""Which steps have a graph, when it is captured, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from pelton.engine.cuda import graphs
from pelton.engine.cuda.graphs import Padded, StepGraphs, decode_sizes
from pelton.kernels.gpu.driver import Stream
from pelton.kernels.gpu.null import NullLibrary, null_gpu

MOST = {"T": 4096, "B": 48, "N": 48}


@pytest.fixture
def null() -> Iterator[NullLibrary]:
    with null_gpu() as library:
        yield library


def made(most: Mapping[str, int] = MOST) -> StepGraphs:
    return StepGraphs(most, Stream())


def sizes(tokens: int, sequences: int, rows: int) -> dict[str, int]:
    return {"T": tokens, "B": sequences, "N": rows}


def test_sizes_of_decode_steps_end_with_the_largest() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert decode_sizes(1000)[-2:] == (448, 512)


@pytest.mark.parametrize(
    ("step", "decode", "padded"),
    [
        (sizes(3, 3, 3), True, Padded(4, 4, 4, decode=True)),
        (sizes(41, 41, 41), True, Padded(48, 48, 48, decode=True)),
        (sizes(3, 3, 2), True, None),
        (sizes(7, 1, 1), False, Padded(8, 1, 1, decode=False)),
        (sizes(100, 3, 2), False, Padded(112, 4, 4, decode=False)),
        (sizes(200, 5, 0), False, Padded(224, 8, 0, decode=False)),
        (sizes(257, 1, 1), False, None),
        (sizes(60, 33, 30), False, None),
        (sizes(9, 1, 9), False, None),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else None,
)
def test_a_step_is_padded_to_sizes_that_come_again(
    null: NullLibrary, step: dict[str, int], decode: bool, padded: Padded | None
) -> None:
    assert made().padded(step, decode=decode) == padded


def test_every_small_step_fits_into_what_it_is_padded_to(null: NullLibrary) -> None:
    every = made({"T": 160, "B": 20, "N": 20})
    for tokens in range(1, 170):
        for sequences in range(1, min(tokens, 20) + 1):
            for rows in {0, 1, sequences}:
                for decode in {False, tokens == sequences}:
                    found = every.padded(sizes(tokens, sequences, rows), decode=decode)
                    if found is not None:
                        assert tokens <= found.tokens <= 160
                        assert sequences <= found.sequences <= 20
                        assert rows <= found.rows <= 20
                        assert found.dims["B+1"] == found.dims["B"] + 1 == found.sequences + 1
                        assert (found.dims["T"], found.dims["N"]) == (found.tokens, found.rows)


def test_decode_steps_are_captured_at_once_and_others_when_they_come_again(null: NullLibrary) -> None:
    own, runs = made(), list[str]()
    decode, mixed = Padded(4, 4, 4, decode=True), Padded(16, 2, 2, decode=False)
    for _ in range(3):
        own.decode(decode, 0, True, lambda: runs.append("decode"))
    assert runs == ["decode"]
    runs.clear()
    own.mixed(mixed, lambda: runs.append("mixed"))
    assert own._mixed[mixed] is None
    own.mixed(mixed, lambda: runs.append("captured"))
    graph = own._mixed[mixed]
    assert graph is not None
    own.mixed(mixed, lambda: runs.append("again"))
    assert own._mixed[mixed] is graph
    assert runs == ["mixed", "captured"], "as it is, then into the graph"
    own.close()


def test_decode_steps_have_a_graph_for_each_slot_and_for_what_follows(null: NullLibrary) -> None:
    """Addresses of the slot, and the sampler's kernel, are in it."""
    own, runs = made(), list[tuple[int, bool]]()
    size = Padded(4, 4, 4, decode=True)
    for slot, scans in ((0, True), (1, True), (0, True), (1, False), (1, True), (1, False)):
        own.decode(size, slot, scans, lambda now=(slot, scans): runs.append(now))  # type: ignore[misc]
    assert runs == [(0, True), (1, True), (1, False)]
    own.close()
    assert not own._decodes


def test_the_graphs_that_were_used_last_are_kept(null: NullLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_MIXED", 2)
    own = made()
    one, two, three = (Padded(8 * i, 1, 1, decode=False) for i in (1, 2, 3))
    for padded in (one, one, two, one, three):
        own.mixed(padded, lambda: None)
    assert list(own._mixed) == [one, three]
    own.close()
    assert not own._mixed
