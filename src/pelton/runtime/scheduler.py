"""The scheduler: which tokens of which sequences the next step computes."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np

from pelton.runtime.kv_cache import KVCacheManager, PrefixHit
from pelton.runtime.scheduled import Int32, ScheduledSequence, SchedulerOutput
from pelton.runtime.seats import CAPACITY, MAX_TOTAL, NUM_COMPUTED, NUM_TOKENS, NUM_UNKNOWN, Everyone, Seats
from pelton.runtime.sequence import Sequence

# The algorithm. There is no prefill and no decode phase: each sequence has num_tokens tokens, of
# which num_computed have their KV in the cache, and a step lets sequences catch up.
#
# 1. All sequences, running and waiting, have one total order: priority, then arrival. A step walks
#    it from the front and gives each sequence min(what it lacks, what is left of the token budget):
#    one token to a decoding sequence, a chunk to one whose prompt is long.
# 2. A running sequence that needs a block when none is free preempts the *last* running sequence.
#    That one is behind it, so it is not part of this step yet; its blocks are freed, it waits again
#    at its old place in the order, and its tokens (prompt and answer) are computed again later. What
#    it had computed usually still lies in the prefix cache. A sequence with nobody behind it keeps its
#    blocks and sits the step out, or takes a smaller chunk.
# 3. A waiting sequence is admitted when a seat (max_num_seqs) is free and its present tokens fit in
#    the free blocks; for this it preempts only sequences of strictly worse priority. If the first
#    waiting sequence cannot be admitted, none behind it is: small requests never overtake.
#    Nor is it admitted while the step computes the very block of prefix that it lacks: one step later
#    it finds that block in the cache (n answers to one prompt compute the prompt once).
# 4. Rows of logits are limited too (the engine sizes their buffer): one is kept for each running
#    sequence, and chunks of prompts whose log-probabilities are wanted share the rest.
# 5. Most steps are mostly decoding, and the order begins with it: the sequences in front that lack one token
#    each are handled together (``_decodes``), by the same rules and up to the first that is a special case.
#
# Nothing starves: the first sequence in the order advances in every step (it can preempt all others,
# and ``add`` refuses what does not fit alone), and a sequence's place is never given away.


class Scheduler:
    """Owns the order of sequences and, through ``kv``, their blocks."""

    def __init__(
        self,
        kv: KVCacheManager,
        seats: Seats,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_logits_rows: int,
        on_admission: Callable[[Sequence, PrefixHit], None] = lambda sequence, hit: None,
    ) -> None:
        assert max_logits_rows >= max_num_seqs
        self.kv = kv
        self.seats = seats
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_logits_rows = max_logits_rows
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self._on_admission = on_admission
        self._preempted: list[str] = []
        self._keys_in_step: set[bytes] = set()
        self._running_seats: Int32 | None = None
        """Seats of ``running``, None after a change."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in whatever state and give its blocks back."""
        for queue in (self.running, self.waiting):
            i = bisect.bisect_left(queue, sequence.order, key=_order)
            if i < len(queue) and queue[i] is sequence:
                del queue[i]
                break
        self._unseat(sequence)

    def _unseat(self, sequence: Sequence) -> None:
        self.kv.free(sequence.kv)
        if sequence.seat >= 0:
            self.seats.leave(sequence)
            self._running_seats = None
        sequence.num_computed = sequence.num_shared_tokens = sequence.capacity = 0

    def schedule(self, *, by_seat: bool = False, decoded: Everyone | None = None) -> SchedulerOutput:
        """Decide one step and allocate its blocks.

        ``by_seat``: where all that run decode and nothing is short, in which case their order decides
        nothing, they may come in the order of seats. ``decoded``: who all decoded in the step before,
        which is in flight.
        """
        self._preempted = []
        self._keys_in_step = set()
        chunks: list[ScheduledSequence] = []
        everyone = self._everyone(decoded) if by_seat else None
        if everyone is None:
            decoding, seats, i = self._decodes()
            starts = self.seats.counters_CS[NUM_COMPUTED, seats]
        else:
            decoding, seats, i = everyone.sequences, everyone.seats_B, len(self.running)
            starts = self.seats.counters_CS[NUM_COMPUTED, everyone.at]
            if isinstance(everyone.at, slice):
                starts = starts.copy()
        budget, rows, admitting = self.max_num_batched_tokens, self.max_logits_rows, True
        budget -= len(decoding)
        rows -= len(decoding)
        while budget > 0:
            runner = self.running[i] if i < len(self.running) else None
            waiter = self.waiting[0] if self.waiting and admitting else None
            if waiter is not None and (runner is None or waiter.order < runner.order):
                if not self._admit(waiter, i, rows):
                    admitting = False
                    continue
                runner = waiter
            if runner is None:
                break
            if runner.complete:  # its last token is being sampled
                i += 1
                continue
            chunk = self._chunk(runner, i, budget, rows)
            if chunk is not None:
                chunks.append(chunk)
                self._note_keys(runner, chunk.num_computed, chunk.num_new)
                budget -= chunk.num_new
                rows -= chunk.num_rows
            if chunk is None or self._preempted:
                admitting = False  # blocks are short: whoever is admitted now would be preempted next
            i += 1
        return SchedulerOutput(
            decoding=decoding,
            decoding_seats=seats,
            decoding_starts=starts,
            chunks=tuple(chunks),
            num_tokens=self.max_num_batched_tokens - budget,
            preempted=tuple(self._preempted),
            everyone=everyone,
        )

    def _everyone(self, decoded: Everyone | None) -> Everyone | None:
        """All who lack tokens, their blocks allocated, if each is to get one and nobody has to step back."""
        if not 0 < len(self.running) <= self.max_num_batched_tokens:
            return None
        newest = self.running[-1]
        if decoded is None and newest.num_tokens - newest.num_computed != 1:  # likely, and cheap to see
            return None
        if self.waiting and self.waiting[0].order < newest.order:
            return None
        everyone = self.seats.everyone
        counters, at = self.seats.counters_CS, everyone.at
        tokens = counters[NUM_TOKENS, at]
        done = tokens > everyone.last_B
        if done.any():  # their last tokens are being sampled
            everyone = self.seats.set_aside(done)
            if not everyone.sequences:
                return None
            at = everyone.at
            tokens = counters[NUM_TOKENS, at]
        # Who decoded in the step before lacks one token again, and wants no other rows of logits.
        if everyone is not decoded and (
            (tokens - counters[NUM_COMPUTED, at] != 1).any() or not self.seats.plain_S[at].all()
        ):
            return None
        short = (tokens > counters[CAPACITY, at]).nonzero()[0]
        if len(short):
            if len(short) > min(pool.num_free for pool in self.kv.pools):
                return None
            self.kv.allocate_one_each([everyone.sequences[i].kv for i in short.tolist()])
            counters[CAPACITY, everyone.seats_B[short]] += self.kv.block_size
        if not counters[NUM_UNKNOWN, at].all():
            for i in np.flatnonzero(tokens % self.kv.block_size == 0).tolist():
                self._note_keys(everyone.sequences[i], int(tokens[i]) - 1, 1)
        return everyone

    def _decodes(self) -> tuple[list[Sequence], Int32, int]:
        """The sequences in front that get one token each, with their seats, and how many of ``running`` are
        dealt with."""
        if self._running_seats is None:
            self._running_seats = np.fromiter((q.seat for q in self.running), np.int32, len(self.running))
        seats = self._running_seats
        if self.waiting:
            seats = seats[: bisect.bisect_left(self.running, self.waiting[0].order, key=_order)]
        counters, size = self.seats.counters_CS, self.kv.block_size
        tokens, computed = counters[NUM_TOKENS, seats], counters[NUM_COMPUTED, seats]
        special = (tokens - computed != 1) | ~self.seats.plain_S[seats]
        n = int(special.argmax()) if special.any() else len(seats)
        # Who has all its tokens sits out: its last one is being sampled.
        chosen = np.flatnonzero(tokens[:n] < counters[MAX_TOTAL, seats[:n]])
        if len(chosen) >= self.max_num_batched_tokens:
            chosen = chosen[: self.max_num_batched_tokens]
            n = int(chosen[-1]) + 1
        for i in chosen[tokens[chosen] > counters[CAPACITY, seats[chosen]]].tolist():
            sequence = self.running[i]
            if not self.kv.allocate(sequence.kv, int(tokens[i])):
                n = i  # it takes blocks from others, or sits out
                chosen = chosen[chosen < n]
                break
            counters[CAPACITY, sequence.seat] += size
        fills = (tokens[chosen] % size == 0) & (counters[NUM_UNKNOWN, seats[chosen]] == 0)
        for i in chosen[fills].tolist():
            self._note_keys(self.running[i], int(computed[i]), 1)
        if len(chosen) == len(self.running):
            return self.running.copy(), seats, n
        running = self.running
        return [running[i] for i in chosen.tolist()], seats[chosen], n

    def _allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for the first ``num_tokens`` tokens; False: blocks are short."""
        if num_tokens > sequence.capacity:
            if not self.kv.allocate(sequence.kv, num_tokens):
                return False
            sequence.capacity = sequence.kv.tables[0].stop * self.kv.block_size
        return True

    def _chunk(self, sequence: Sequence, i: int, budget: int, rows: int) -> ScheduledSequence | None:
        """Allocate and describe the chunk of ``self.running[i]``; None when it must sit the step out."""
        start = sequence.num_computed
        num_new = min(sequence.num_tokens - start, budget)
        first_row = last_row = 0
        if sequence.prompt_rows_wanted:
            assert sequence.prompt_logprobs is not None
            first_row = max(start, len(sequence.prompt_logprobs) - 1)
            spare_rows = rows - (len(self.running) - i - 1)
            num_new = min(num_new, first_row - start + max(1, spare_rows))
        while not self._allocate(sequence, start + num_new):
            if i + 1 < len(self.running):
                self._preempt(self.running[-1])
            elif num_new > 1:
                num_new //= 2
            else:
                return None
        end = start + num_new
        if sequence.prompt_rows_wanted:
            last_row = max(first_row, min(end, sequence.prompt_rows_wanted))
        else:
            self.seats.plain_S[sequence.seat] = True
        return ScheduledSequence(sequence, start, num_new, first_row, last_row, end == sequence.num_tokens)

    def _admit(self, sequence: Sequence, i: int, rows: int) -> bool:
        """Move ``self.waiting[0]`` to ``self.running[i]`` if it may run now."""
        keys = sequence.keys
        # The row that scores a cached prompt token is not computed, so prompt_logprobs bypass hits.
        if keys is None or sequence.prompt_rows_wanted:
            hit = self.kv.no_hit
        else:
            full = sequence.num_known // self.kv.block_size
            full_keys = keys.upto(sequence.tokens, full)[:full]
            hit = self.kv.find_prefix(full_keys, sequence.num_tokens)
            missing = hit.num_tokens // self.kv.block_size
            if missing < full and full_keys[missing] in self._keys_in_step:
                return False
        while len(self.running) >= self.max_num_seqs or not self.kv.fits(hit, sequence.num_tokens):
            victim = self.running[-1] if i < len(self.running) else None
            if victim is None or victim.request.priority <= sequence.request.priority:
                return False
            self._preempt(victim)
        if rows <= len(self.running) - i:
            return False  # the rows of logits left are kept for those behind
        assert self.waiting[0] is sequence
        del self.waiting[0]
        self.running.insert(i, sequence)
        self.seats.take(sequence)
        self._running_seats = None
        self.kv.adopt(sequence.kv, hit)
        sequence.num_shared_tokens = sequence.capacity = hit.num_tokens
        sequence.num_computed = min(hit.num_tokens, sequence.num_tokens - 1)
        self._on_admission(sequence, hit)
        return True

    def _note_keys(self, sequence: Sequence, num_computed: int, num_new: int) -> None:
        """Remember which blocks of prefix the step fills."""
        keys, size = sequence.keys, self.kv.block_size
        first = num_computed // size
        last = min(num_computed + num_new, sequence.num_known) // size
        if keys is not None and last > first:
            self._keys_in_step.update(keys.upto(sequence.tokens, last)[first:last])

    def _preempt(self, victim: Sequence) -> None:
        assert self.running[-1] is victim
        self.running.pop()
        self._unseat(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(victim.request_id)
        self.add(victim)

    def preempt_all(self) -> None:
        """Take their blocks from all running sequences: what they computed is worth nothing now."""
        while self.running:
            self._preempt(self.running[-1])

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """A step has computed the KV of the first ``num_computed`` tokens."""
        sequence.num_computed = num_computed
        self.settle(sequence, num_computed)

    def settle(self, sequence: Sequence, num_computed: int) -> None:
        """The KV of the first ``num_computed`` tokens, all known, is there: index and release blocks."""
        if sequence.keys is not None:
            full = num_computed // self.kv.block_size
            if full > sequence.kv.num_indexed_blocks:
                self.kv.index(sequence.kv, sequence.keys.upto(sequence.tokens, full), num_computed)
        if self.kv.slides:
            self.kv.release_slid(sequence.kv, num_computed)


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order
