"""The kernels of ``triton_sample.py``, which every engine for a GPU carries besides its plan's."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.kernels.launch import KernelSource, power_of_two

MODULE = "pelton.kernels.sampling.triton_sample"
_PIECE = 8192


@dataclass(frozen=True)
class Pieces:
    """How rows of logits are shared out among programs."""

    count: int
    size: int
    """Logits of a piece; the last may have fewer."""
    room: int
    """Candidates of a piece that there is room for."""

    @classmethod
    def of(cls, vocab: int) -> Pieces:
        """For rows of ``vocab`` logits."""
        size = min(_PIECE, max(16, power_of_two(vocab)))
        return cls(count=-(-vocab // size), size=size, room=max(16, size // 8))


def sampler_sources(vocab: int) -> dict[str, KernelSource]:
    """For rows of ``vocab`` logits, parameters in the kernels' order.

    ``scan``, ``weigh``: a program for each piece of each row; ``choose``: one a row.
    """
    pieces = Pieces.of(vocab)
    row = (("V", vocab), ("PIECES", pieces.count))
    rest = (("PIECES_2", power_of_two(pieces.count)), ("PIECE", pieces.size), ("ROOM", pieces.room))
    parameters = (("temperature", "*fp32"), ("top_k", "*i32"), ("top_p", "*fp32"), ("min_p", "*fp32"))
    largest = (("part_max", "*fp32"), ("part_at", "*i32"))
    sums = (("part_sum", "*fp32"), ("part_count", "*i32"))
    candidates = (("candidate", "*fp32"), ("candidate_at", "*i32"))
    logits = (("logits", "*fp32"),)
    return {
        "scan": KernelSource(
            module=MODULE,
            function="scan",
            types=(*logits, *largest),
            constants=(*row, ("PIECE", pieces.size)),
            num_warps=8,
        ),
        "weigh": KernelSource(
            module=MODULE,
            function="weigh",
            types=(*logits, *parameters, largest[0], *sums, *candidates),
            constants=(*row, *rest),
            num_warps=8,
        ),
        "choose": KernelSource(
            module=MODULE,
            function="choose",
            types=(
                *logits,
                *parameters,
                ("uniform", "*fp32"),
                *largest,
                *sums,
                *candidates,
                ("tokens", "*i32"),
                ("tokens_host", "*i32"),
            ),
            constants=(*row, *rest, ("BLOCK", min(2048, pieces.size))),
            num_warps=8,
        ),
    }
