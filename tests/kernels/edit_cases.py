"""Runs the GPU's edits of logits and log-probabilities, and compares them with the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.kernels.sampling_cases import launch

from pelton.kernels.sampling import reference
from pelton.kernels.sampling.cuda import LIST_ROOM, MOST_LOGPROBS, edit_piece, edit_sources, mask_words
from pelton.runtime.kv_cache import SequenceKV
from pelton.runtime.logits import LogitsProcessor
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sequence import Sequence

PARAMETERS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {3: 4.0, 9: -6.0, 11: 2.5}, "repetition_penalty": 0.7},
    {"allowed_token_ids": (0, 5, 31, 32, 33, 48)},
    {"min_tokens": 60, "stop_token_ids": (1, 7), "logit_bias": {7: 9.0}},
    {},
    {"bad": ((4,), (6,)), "logit_bias": {4: 2.0}, "frequency_penalty": -1.5},
]


def sequence_of(vocab: int, seat: int, parameters: dict[str, Any]) -> Sequence:
    rng = np.random.default_rng(seat)
    prompt = tuple(rng.integers(0, min(vocab, 60), 20).tolist())
    params = {k: v for k, v in parameters.items() if k != "bad"}
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**params),
        bad_word_ids=parameters.get("bad", ()),
    )
    kv = SequenceKV(1, 1)
    sequence = Sequence(request, max_tokens=64, eos_token_ids=(2,), arrival_index=0, kv=kv, keys=None)
    sequence.seat = seat
    for token in rng.integers(0, min(vocab, 60), 30).tolist():
        sequence.append(token)
    return sequence


class Tables:
    """The device's, for ``seats`` seats."""

    def __init__(self, vocab: int, seats: int, device: str) -> None:
        self.vocab, self.device, self.sources = vocab, device, edit_sources(vocab)
        words = mask_words(vocab)
        self.counts = torch.full((seats, vocab), 9, dtype=torch.int16, device=device)
        self.allowed = torch.zeros((seats, words), dtype=torch.int32, device=device)
        self.ids = torch.zeros((seats, LIST_ROOM), dtype=torch.int32, device=device)
        self.values = torch.zeros((seats, LIST_ROOM), dtype=torch.float32, device=device)
        self.lengths = torch.zeros((seats, 2), dtype=torch.int32, device=device)

    def begin(self, sequence: Sequence, sampled: np.ndarray) -> None:
        edits = LogitsProcessor(sequence).device_edits(sequence)
        seat, always, ends = edits.seat, len(edits.bias_ids), len(edits.end_ids)
        self.counts[seat] = 0
        pairs = np.stack([edits.token_ids, edits.counts], axis=1).astype(np.int32)
        self._launch(
            "mark", (1,), counts=self.counts[seat], pairs=self.tensor(pairs), n=len(pairs),
            sampled=self.tensor(sampled), unknown=edits.unknown,
        )  # fmt: skip
        if edits.allowed_ids is not None:
            bits = np.zeros(32 * self.allowed.shape[1], bool)
            bits[edits.allowed_ids] = True
            self.allowed[seat] = self.tensor(np.packbits(bits, bitorder="little").view(np.int32))
        self.ids[seat, : always + ends] = self.tensor(np.concatenate([edits.bias_ids, edits.end_ids]))
        self.values[seat, :always] = self.tensor(edits.bias)
        self.lengths[seat] = self.tensor(np.array([always, ends], np.int32))

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(self.device)

    def _launch(self, name: str, grid: tuple[int, ...], **tensors: Any) -> None:
        launch(self.sources[name], grid, tensors)

    def edit(self, logits: torch.Tensor, sequences: list[Sequence], seats: np.ndarray) -> None:
        params = [q.request.sampling for q in sequences]
        n, pieces = len(sequences), -(-self.vocab // edit_piece(self.vocab))
        seat = self.tensor(seats)
        short = [q.num_output_tokens < p.min_tokens for q, p in zip(sequences, params, strict=True)]
        numbers = {
            "masked": np.array([p.allowed_token_ids is not None for p in params], np.int32),
            "short": np.array(short, np.int32),
            "repetition": np.array([p.repetition_penalty for p in params], np.float32),
            "frequency": np.array([p.frequency_penalty for p in params], np.float32),
            "presence": np.array([p.presence_penalty for p in params], np.float32),
        }
        all_of = {
            "logits": logits, "seat": seat, "counts": self.counts, "allowed": self.allowed,
            "ids": self.ids, "values": self.values, "lengths": self.lengths,
            **{name: self.tensor(value) for name, value in numbers.items()},
        }  # fmt: skip
        self._launch("bias", (n,), **all_of)
        self._launch("edit", (n, pieces), **all_of)

    def count(self, seats: np.ndarray, tokens: np.ndarray) -> None:
        self._launch(
            "count", (len(seats),), seat=self.tensor(seats), tokens=self.tensor(tokens), counts=self.counts
        )


def check_edits(device: str, vocab: int) -> int:
    """Logits edited twice, a token apart, in seats that are not the rows'."""
    rng = np.random.default_rng(vocab)
    seats = rng.permutation(len(PARAMETERS) + 2)[: len(PARAMETERS)].astype(np.int32)
    sequences = [
        sequence_of(vocab, s, p) for s, p in zip(seats.tolist(), PARAMETERS, strict=True)
    ]  # fmt: skip
    tables = Tables(vocab, len(PARAMETERS) + 2, device)
    sampled = rng.integers(0, min(vocab, 60), len(sequences)).astype(np.int32)
    for n, sequence in enumerate(sequences):
        sequence.expect(-1 - n)  # the step before still samples this one
        tables.begin(sequence, sampled)
        sequence.reveal(int(sampled[n]))
    rows = np.where([LogitsProcessor(q).edits for q in sequences], seats, -1).astype(np.int32)
    for _ in range(2):
        raw = rng.standard_normal((len(sequences), vocab), dtype=np.float32) * 4
        logits = tables.tensor(raw)
        tables.edit(logits, sequences, rows)
        for n, sequence in enumerate(sequences):
            want = raw[n].copy()
            LogitsProcessor(sequence).apply(want, sequence)
            np.testing.assert_allclose(
                logits[n].cpu().numpy(), want, rtol=1e-6, atol=1e-6, err_msg=f"{n} {PARAMETERS[n]}"
            )
        tokens = rng.integers(0, min(vocab, 60), len(sequences)).astype(np.int32)
        tokens[1] = -1  # its logits were broken
        tables.count(rows, tokens)
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            if token >= 0:
                sequence.append(token)
    return len(sequences)


def check_logprobs(device: str, vocab: int) -> int:
    rng = np.random.default_rng(vocab)
    wanted = np.array([0, 3, -1, MOST_LOGPROBS, 2, 5], np.int32)
    n = len(wanted)
    raw = np.round(rng.standard_normal((n, vocab), dtype=np.float32) * 3, 1)
    raw[1, 5] = np.nan
    raw[4, : vocab // 2] = -np.inf
    seat = np.array([-1, 3, 2, -1, 0, -1], np.int32)
    tokens = rng.integers(vocab // 2, vocab, n).astype(np.int32)
    tables = Tables(vocab, 4, device)
    logits, kept = tables.tensor(raw), tables.tensor(np.zeros_like(raw))
    tensors = {
        "logits": logits, "kept": kept, "seat": tables.tensor(seat), "wanted": tables.tensor(wanted),
        "tokens": tables.tensor(tokens),
        "values": torch.zeros((n, 1 + MOST_LOGPROBS), device=device),
        "ranks": torch.zeros(n, dtype=torch.int32, device=device),
        "ids": torch.zeros((n, MOST_LOGPROBS), dtype=torch.int32, device=device),
    }  # fmt: skip
    launch(tables.sources["keep"], (n, -(-vocab // edit_piece(vocab))), tensors)
    logits[tensors["seat"] >= 0] = 0.0  # edited since
    launch(tables.sources["logprobs"], (n,), tensors)
    values, ranks, ids = (tensors[name].cpu().numpy() for name in ("values", "ranks", "ids"))
    chosen, want_ranks, want_ids, want = reference.log_softmax_topk(raw, tokens, MOST_LOGPROBS)
    for i, most in enumerate(wanted.tolist()):
        if most < 0:
            assert not values[i].any()
            continue
        np.testing.assert_allclose(values[i, 0], chosen[i], rtol=2e-5, atol=2e-5)
        assert ranks[i] == want_ranks[i]
        np.testing.assert_array_equal(ids[i, :most], want_ids[i, :most])
        np.testing.assert_allclose(values[i, 1 : 1 + most], want[i, :most], rtol=2e-5, atol=2e-5)
    return n
