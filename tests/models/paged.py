"""Drive a model's ``forward`` as the runtime would: packed tokens, paged caches, shuffled blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from pelton import nn

Step = Sequence[tuple[int, Sequence[int]]]
"""(sequence, its next tokens) for each sequence of a step, in packed order."""


@dataclass
class PagedRunner:
    """Caches full of NaN and block tables in random order for ``model``.

    ``step`` feeds tokens and returns the logits of every token, per sequence. ``forward`` may be
    replaced by a traced graph's.
    """

    model: nn.CausalLM
    max_seq_len: int = 64
    block_size: int = 4
    max_sequences: int = 4
    forward: Callable[..., torch.Tensor] | None = None
    kv_dtype: torch.dtype = torch.float32
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.columns = -(-self.max_seq_len // self.block_size)
        self.tables = []
        blocks = self.columns * self.max_sequences + 3
        for _ in self.model.kv_groups():
            order = torch.randperm(blocks, generator=generator)[: self.columns * self.max_sequences]
            self.tables.append(order.view(self.max_sequences, self.columns).int())
        shapes = [(blocks, kv.num_kv_heads, self.block_size, kv.head_dim) for kv in self.model.layer_kv()]
        empty = 0.0 if self.kv_dtype == torch.int8 else float("nan")
        self.k_caches = [torch.full(shape, empty).to(self.kv_dtype) for shape in shapes]
        self.v_caches = [torch.full(shape, empty).to(self.kv_dtype) for shape in shapes]

    def arguments(self, step: Step, rows: Sequence[int]) -> tuple[object, ...]:
        """``forward``'s arguments for the step, with the logits of packed ``rows``."""
        ids = [token for _, tokens in step for token in tokens]
        starts = [self.lengths.get(s, 0) for s, _ in step]
        positions = [start + i for start, (_, t) in zip(starts, step, strict=True) for i in range(len(t))]
        sequences = [s for s, tokens in step for _ in tokens]
        seq_lens = [start + len(t) for start, (_, t) in zip(starts, step, strict=True)]
        cu = torch.tensor([0] + [len(t) for _, t in step]).cumsum(0).int()
        groups = []
        for table in self.tables:
            slots = [
                int(table[s, p // self.block_size]) * self.block_size + p % self.block_size
                for s, p in zip(sequences, positions, strict=True)
            ]
            groups.append(nn.AttentionInputs(int32(slots), table[[s for s, _ in step]], cu, int32(seq_lens)))
        return int32(ids), int32(positions), self.k_caches, self.v_caches, groups, int32(rows)

    def step(self, step: Step) -> dict[int, torch.Tensor]:
        """Logits (its tokens, V) of each sequence in the step; NaN anywhere is an error."""
        total = sum(len(tokens) for _, tokens in step)
        forward = self.forward or self.model
        with torch.no_grad():
            logits = forward(*self.arguments(step, range(total)))
        assert torch.isfinite(logits).all()
        assert logits.dtype == torch.float32
        for sequence, tokens in step:
            self.lengths[sequence] = self.lengths.get(sequence, 0) + len(tokens)
        parts = logits.split([len(tokens) for _, tokens in step])
        return {sequence: part for (sequence, _), part in zip(step, parts, strict=True)}


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def run_packed(runner: PagedRunner, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of every token of every text, by a mix of prefill, chunked prefill and decode.

    One text is prefilled whole, the others arrive later in chunks beside its decoding; the last
    half of each text goes token by token.
    """
    parts: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(texts))}
    done = [0] * len(texts)
    turn = 0
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        step: list[tuple[int, Sequence[int]]] = []
        for i, text in enumerate(texts):
            if done[i] >= len(text) or turn < i:
                continue
            left_of_prompt = len(text) // 2 - done[i]
            chunk = (left_of_prompt if i == 0 else min(left_of_prompt, 3)) if left_of_prompt > 0 else 1
            step.append((i, text[done[i] : done[i] + chunk]))
            done[i] += chunk
        # The packed order is no particular one.
        for sequence, logits in runner.step(step[::-1] if turn % 2 else step).items():
            parts[sequence].append(logits)
        turn += 1
    return [torch.cat(parts[i]) for i in range(len(texts))]
