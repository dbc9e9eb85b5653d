"""The executor: in-flight batching around a session.

``add`` and ``abort`` may come at any time between steps; each ``step`` schedules, runs the session,
samples, commits and returns what it added to which request. It knows tokens only: text belongs to
the front ends. One thread drives it; ``stats`` may be read from another.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence as Seq

from pelton.engine.artifact import Engine
from pelton.engine.batch import ModelSession
from pelton.engine.batch_sampling import ALL_EXCLUDED
from pelton.errors import DeviceError, EngineError, NotReadyError, QueueFullError, RequestError
from pelton.runtime.ahead import Ahead, InFlight, needs_host
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.counters import Counters
from pelton.runtime.host_step import Computed, compute
from pelton.runtime.host_time import HostClock
from pelton.runtime.input_batch import InputBatchBuilder
from pelton.runtime.kv_cache import KVCacheManager, PrefixHit
from pelton.runtime.prefix_cache import PrefixKeys, root_key
from pelton.runtime.request import FinishReason, Request, RequestUpdate
from pelton.runtime.sampler import NO_TOKEN_LEFT, Sampled, logits_processor, not_finite
from pelton.runtime.scheduled import ScheduledSequence
from pelton.runtime.scheduler import Scheduler
from pelton.runtime.seats import Seats
from pelton.runtime.sequence import Sequence
from pelton.runtime.stats import ExecutorStats
from pelton.runtime.trace import TraceWriter

logger = logging.getLogger(__name__)


class Executor:
    """Drives ``session`` (not closed with it) with any number of requests in flight; ``trace`` records
    what happens."""

    def __init__(
        self,
        session: ModelSession,
        config: ExecutorConfig | None = None,
        *,
        trace: TraceWriter | None = None,
    ) -> None:
        self._trace = trace
        self.session = session
        self.config = (config or ExecutorConfig()).resolve(session)
        build, model = session.config.build, session.config.model
        assert build.block_size and build.max_seq_len
        assert self.config.max_num_seqs and self.config.max_num_batched_tokens and self.config.max_logits_rows
        self._max_seq_len = build.max_seq_len
        self.kv = KVCacheManager(
            model.kv_groups,
            session.num_blocks,
            block_size=build.block_size,
            max_seq_len=build.max_seq_len,
            poison=getattr(session, "poison_blocks", None),
        )
        self.seats = Seats(
            self.config.max_num_seqs,
            num_groups=len(model.kv_groups),
            num_columns=self.kv.num_columns,
            max_seq_len=build.max_seq_len,
        )
        self.scheduler = Scheduler(
            self.kv,
            self.seats,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_logits_rows=self.config.max_logits_rows,
            on_admission=self._admitted,
        )
        self._batches = InputBatchBuilder(
            self.seats, block_size=build.block_size, max_num_tokens=self.config.max_num_batched_tokens
        )
        self._clock = HostClock()
        self._ahead: Ahead | None = None
        if trace is None:
            self._ahead = Ahead(
                session,
                self.seats,
                self._batches,
                block_size=build.block_size,
                windows=any(self.kv.windows),
                caches=self.config.enable_prefix_caching,
                eos_token_ids=model.eos_token_ids,
                clock=self._clock,
            )
        """Runs steps ahead of the host, where the session samples by itself."""
        self._sequences: dict[str, Sequence] = {}
        self._host_sampled = 0
        """Sequences that need their logits on the host."""
        self._ended: list[RequestUpdate] = []
        self._closed = False
        self._arrivals = 0
        self._counters = Counters()

    @property
    def max_request_tokens(self) -> int:
        """Most tokens (prompt and answer) of one request: the engine's max_seq_len, or what its KV
        cache holds where that is less. The last token of an answer needs no place in the cache."""
        return min(self._max_seq_len, self.kv.max_tokens() + 1)

    @property
    def has_work(self) -> bool:
        """True while ``step`` has something to compute or to report."""
        return bool(self._sequences or self._ended or (self._ahead and self._ahead.in_flight))

    def add(self, request: Request) -> None:
        """Queue a validated request (``runtime.validation``).

        Raises ``QueueFullError`` when ``max_waiting`` requests wait, ``RequestError`` for one that can
        never fit or whose id is in flight, ``NotReadyError`` after ``close``.
        """
        if self._closed:
            raise NotReadyError("the executor is closed")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise QueueFullError(f"{self.config.max_waiting} requests are waiting already; try again later")
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        num_prompt, limit = len(request.prompt_token_ids), self.max_request_tokens
        if not num_prompt:
            raise RequestError("the prompt is empty", param="prompt")
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            max_tokens = max(1, limit - num_prompt)
        if num_prompt + max_tokens > limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, but a request may have "
                f"{limit} tokens in all",
                param="max_tokens",
            )
        if not self.has_work:
            self._counters.progress()
        sequence = Sequence(
            request,
            max_tokens=max_tokens,
            eos_token_ids=self.session.config.model.eos_token_ids,
            arrival_index=self._arrivals,
            kv=self.kv.new_sequence(),
            keys=self._prefix_keys(request.cache_salt),
        )
        self._arrivals += 1
        sequence.edited = logits_processor(sequence).edits
        self._host_sampled += needs_host(sequence)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        if self._trace is not None:
            self._trace.add(request)

    def _prefix_keys(self, cache_salt: str) -> PrefixKeys | None:
        if not self.config.enable_prefix_caching:
            return None
        engine_id = str(getattr(self.session, "engine_id", self.session.config.model.name))
        root = root_key(engine_id, int(getattr(self.session, "weight_epoch", 0)), cache_salt)
        return PrefixKeys(root, self.kv.block_size)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state and free its blocks at once; unknown ids (it may just have
        finished) are ignored. The next step reports it with finish_reason "abort"."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            if self._trace is not None:
                self._trace.abort(request_id)
            self._ended.append(self._end(sequence, "abort"))

    def step(self) -> list[RequestUpdate]:
        """Run one step; the updates of the requests that got tokens or ended."""
        with self._clock.step():
            return self._step()

    def _step(self) -> list[RequestUpdate]:
        updates, self._ended = self._ended, []
        if self._ahead is not None and self._ahead.available:
            if not self._host_sampled:
                return updates + self._step_ahead(self._ahead)
            updates += self._collect(self._ahead)
            self.seats.begun_S[:] = False  # tokens that the host takes are not counted on the device
        output = self.scheduler.schedule()
        if output.num_tokens:
            self._counters.steps += 1
            new = self._run(output.scheduled)
            updates += new
            self._counters.progress()
            if self._trace is not None:
                self._trace.step(output, new)
        return updates

    def _step_ahead(self, ahead: Ahead) -> list[RequestUpdate]:
        """Start the next step, then take what the one before it has sampled."""
        before = ahead.take()
        decoded = before.step.everyone if before is not None else None
        output = self.scheduler.schedule(by_seat=True, decoded=decoded)
        if output.num_tokens:
            ahead.submit(output, before)
            self._counters.steps += 1
            self._counters.computed_tokens += output.num_tokens
            self._counters.progress()
        return self._take(ahead, before)

    def _collect(self, ahead: Ahead) -> list[RequestUpdate]:
        """Wait for the step in flight, if there is one."""
        return self._take(ahead, ahead.take())

    def _take(self, ahead: Ahead, flight: InFlight | None) -> list[RequestUpdate]:
        """Commit what a step in flight computed. Who has ended meanwhile is left out."""
        if flight is None:
            return []
        sampled = ahead.collect(flight)
        for sequence, num_computed in ahead.filled(flight):
            self.scheduler.settle(sequence, num_computed)
        tokens = sampled.tokens_N.tolist()
        self._counters.generated_tokens += len(tokens)
        self._counters.progress()
        everyone = flight.step.everyone
        ids = everyone.request_ids if everyone is not None else [q.request_id for q in sampled.sequences]
        logprobs = sampled.logprobs_N
        updates: list[RequestUpdate | None]
        if logprobs is None:
            updates = [
                RequestUpdate(request_id=request_id, new_token_ids=(token,))
                for request_id, token in zip(ids, tokens, strict=True)
            ]
        else:
            updates = [
                RequestUpdate(
                    request_id=request_id, new_token_ids=(token,), logprobs=() if found is None else (found,)
                )
                for request_id, token, found in zip(ids, tokens, logprobs, strict=True)
            ]
        special = sampled.special_N.nonzero()[0].tolist()
        if not special:
            return updates  # type: ignore[return-value]
        for n in special:
            result = Sampled(tokens[n], logprobs[n] if logprobs else None)
            updates[n] = self._special(sampled.sequences[n], result, sits=bool(sampled.sits_N[n]))
        return [update for update in updates if update is not None]

    def _special(self, sequence: Sequence, sampled: Sampled, *, sits: bool) -> RequestUpdate | None:
        """The update of a sequence to which more happened than that it got a token."""
        token = sampled.token
        if self._sequences.get(sequence.request_id) is not sequence:
            self._counters.generated_tokens -= 1
            return None
        if not sits:
            sequence.reveal(token)
        if token < 0:
            self._counters.generated_tokens -= 1
            excluded = token == ALL_EXCLUDED and sequence.edited
            return self._end(
                sequence, "error", error=NO_TOKEN_LEFT if excluded else not_finite(sequence.num_known - 2)
            )
        reason, stop = sequence.finish_reason(token)
        if reason is None:
            return self._update(sequence, sampled)
        return self._end(sequence, reason, sampled=sampled, stop=stop)

    def _run(self, scheduled: Seq[ScheduledSequence], retried: bool = False) -> list[RequestUpdate]:
        """Compute and commit. When the computation raises, each member is tried once more alone, and
        those that fail again end with an error: nothing of a failed run was committed, and what it
        may have written lies in its own members' blocks."""
        try:
            results = compute(self.session, self._batches, scheduled, self._clock)
        except DeviceError:
            raise  # nothing on the device can be trusted, so no other request would fare better
        except Exception as error:
            if retried:
                logger.exception("request %s failed again alone", scheduled[0].sequence.request_id)
                message = f"the engine failed on this request: {type(error).__name__}: {error}"
                return [self._end(scheduled[0].sequence, "error", error=message)]
            logger.warning("a step of %d requests failed (%s); retrying each alone", len(scheduled), error)
            return [update for one in scheduled for update in self._run((one,), retried=True)]
        updates = [self._commit(s, r) for s, r in zip(scheduled, results, strict=True)]
        return [update for update in updates if update is not None]

    def _commit(self, s: ScheduledSequence, result: Computed) -> RequestUpdate | None:
        """Make a step's result part of its sequence; the update for the front end, if any."""
        sequence, sampled = s.sequence, result.sampled
        error = result.error or (sampled.error if sampled is not None else None)
        if error is not None:
            return self._end(sequence, "error", error=error)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += result.prompt_logprobs
        self.scheduler.commit(sequence, s.num_computed + s.num_new)
        self._counters.computed_tokens += s.num_new
        if sampled is None:
            return None
        sequence.append(sampled.token)
        self._counters.generated_tokens += 1
        reason, stop = sequence.finish_reason(sampled.token)
        if reason is None:
            return self._update(sequence, sampled)
        return self._end(sequence, reason, sampled=sampled, stop=stop)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        sampled: Sampled | None = None,
        stop: int | None = None,
        error: str | None = None,
    ) -> RequestUpdate:
        del self._sequences[sequence.request_id]
        self._host_sampled -= needs_host(sequence)
        self.scheduler.remove(sequence)
        self._counters.finished[reason] += 1
        return self._update(sequence, sampled, reason, stop, error)

    def _update(
        self,
        sequence: Sequence,
        sampled: Sampled | None,
        reason: FinishReason | None = None,
        stop: int | None = None,
        error: str | None = None,
    ) -> RequestUpdate:
        first = sequence.num_known_output_tokens == 1 and sampled is not None
        return RequestUpdate(
            request_id=sequence.request_id,
            new_token_ids=(sampled.token,) if sampled is not None else (),
            logprobs=(sampled.logprobs,) if sampled is not None and sampled.logprobs is not None else (),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first and sequence.prompt_logprobs else None,
            finish_reason=reason,
            stop_reason=stop,
            error=error,
            num_cached_tokens=sequence.num_cached_tokens if first else 0,
            queue_time=max(0.0, sequence.queue_time) if first else 0.0,
        )

    def _admitted(self, sequence: Sequence, hit: PrefixHit) -> None:
        if sequence.queue_time >= 0:
            return  # it was preempted and is back
        sequence.queue_time = max(0.0, time.monotonic() - sequence.request.arrival_time)
        sequence.num_cached_tokens = sequence.num_computed
        self._counters.prompt_tokens += sequence.num_prompt_tokens
        self._counters.prefix_hit_tokens += sequence.num_computed

    def update_weights(self, engine: Engine) -> None:
        """Run the weights of ``engine`` from the next step on (``Session.update_weights``).

        Requests in flight go on with the tokens they have: these are computed again, and no KV of the
        old weights is used for anything. Raises ``PeltonError`` when the session refuses ``engine``,
        and then nothing has changed; any other error leaves the executor unusable.
        """
        update = getattr(self.session, "update_weights", None)
        if update is None:
            raise EngineError("this session's weights cannot be replaced; start a new one")
        if self._ahead is not None:
            self._ended += self._collect(self._ahead)
        update(engine)
        self.recompute_all()

    def recompute_all(self) -> None:
        """Forget all KV, as after new weights; requests in flight compute their tokens again."""
        if self._trace is not None:
            self._trace.recompute()
        self.scheduler.preempt_all()
        self.kv.reset_prefix_cache()
        for sequence in self._sequences.values():
            sequence.keys = self._prefix_keys(sequence.request.cache_salt)
            if sequence.prompt_rows_wanted:
                # Of the prompt, either all log-probabilities are the old weights' or none.
                sequence.prompt_logprobs = [None]

    def restart_host_time(self) -> None:
        """Count the host's time per step anew, as for a measurement."""
        self._clock = HostClock()
        self._counters.forget_host_time()
        if self._ahead is not None:
            self._ahead.clock = self._clock

    def stats(self) -> ExecutorStats:
        """A snapshot; cheap."""
        if not self.has_work:
            self._counters.progress()
        late = self.has_work and self._counters.idle_seconds > self.config.watchdog_seconds
        return self._counters.snapshot(self.session, self.scheduler, self.kv, self._clock, stuck=late)

    def close(self) -> None:
        """Abort everything in flight; idempotent. The session stays open."""
        self._closed = True
        if self._ahead is not None:
            with contextlib.suppress(DeviceError):  # it is why we close, and has been reported
                self._ended += self._collect(self._ahead)
        for request_id in list(self._sequences):
            self.abort(request_id)
