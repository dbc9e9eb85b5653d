"""The kernels of ``triton_sample.py`` and ``triton_edit.py``: every engine for a GPU carries them."""

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
        return cls(count=-(-vocab // size), size=size, room=max(16, size // 4))


def sampler_sources(vocab: int) -> dict[str, KernelSource]:
    """For rows of ``vocab`` logits, parameters in the kernels' order.

    ``scan``, ``weigh``: a program for each piece of each row; ``choose``: one a row.
    """
    pieces = Pieces.of(vocab)
    row = (("V", vocab), ("PIECES", pieces.count))
    rest = (("PIECES_2", power_of_two(pieces.count)), ("PIECE", pieces.size), ("ROOM", pieces.room))
    parameters = (("temperature", "*fp32"), ("top_k", "*i32"), ("top_p", "*fp32"), ("min_p", "*fp32"))
    largest = (("part_max", "*fp32"), ("part_at", "*i32"))
    sums = (("part_sum", "*fp32"), ("part_count", "*i32"), ("part_reach", "*fp32"))
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
            constants=(*row, *rest, ("BLOCK", min(2048, pieces.size)), ("ROW_BLOCK", min(4096, pieces.size))),
            num_warps=8,
        ),
    }


#: Of a token's count: the prompt has it.
IN_PROMPT = 0x8000
#: Entries of a sequence's list of biased and excluded tokens; more are left to the host.
LIST_ROOM = 1024
#: Alternatives of a token, at most.
MOST_LOGPROBS = 20
EDIT_MODULE = "pelton.kernels.sampling.triton_edit"


def mask_words(vocab: int) -> int:
    """int32 words of a bit for each token."""
    return -(-vocab // 32)


def edit_sources(vocab: int) -> dict[str, KernelSource]:
    """The kernels of ``triton_edit.py``, parameters in the kernels' order.

    ``mark``: one program; ``keep``, ``edit``: a program for each piece of each row; ``bias``, ``count``,
    ``logprobs``: one a row.
    """
    piece = Pieces.of(vocab).size
    logits, seat, counts = ("logits", "*fp32"), ("seat", "*i32"), ("counts", "*i16")
    tokens, wanted, kept = ("tokens", "*i32"), ("wanted", "*i32"), ("kept", "*fp32")
    row, block = ("V", vocab), ("BLOCK", 512)

    def source(
        name: str, types: tuple[tuple[str, str], ...], *constants: tuple[str, int], warps: int = 4
    ) -> KernelSource:
        return KernelSource(
            module=EDIT_MODULE, function=name, types=types, constants=constants, num_warps=warps
        )

    penalties = tuple((name, "*fp32") for name in ("repetition", "frequency", "presence"))
    entries = (("ids", "*i32"), ("values", "*fp32"), ("lengths", "*i32"))
    found = (("values", "*fp32"), ("ranks", "*i32"), ("ids", "*i32"))
    places = (("pairs", "*i32"), ("n", "i32"), ("sampled", "*i32"), ("unknown", "i32"))
    edited = (logits, seat, ("masked", "*i32"), *penalties, counts, ("allowed", "*i32"))
    words = ("WORDS", mask_words(vocab))
    return {
        "mark": source("mark", (counts, *places), block),
        "keep": source("keep", (logits, seat, wanted, kept), row, ("PIECE", piece), warps=8),
        "bias": source("bias", (logits, seat, ("short", "*i32"), *entries), row, ("ROOM", LIST_ROOM), block),
        "edit": source("edit", edited, row, words, ("PIECE", piece), warps=8),
        "count": source("count", (seat, tokens, counts), row, warps=1),
        "logprobs": source(
            "logprobs",
            (logits, kept, seat, wanted, tokens, *found),
            row,
            ("MOST", MOST_LOGPROBS),
            ("BLOCK", min(4096, piece)),
            warps=8,
        ),
    }
