"""The output processor: token updates become text, answers and finished outputs. Runs in the front end.

Stop strings are found here, wherever token borders fall. Text that could be the beginning of a stop
string is held back, so none of it ever reaches a stream; the executor, which knows tokens only, is told
through the returned aborts that the answer has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pelton.runtime.detokenizer import IncrementalDetokenizer
from pelton.runtime.request import CompletionOutput, Request, RequestOutput, RequestUpdate, TokenLogprobs
from pelton.runtime.tokenizer import Tokenizer


class StopStringMatcher:
    """Passes text through until one of ``stops`` appears.

    The match that completes first wins, and of those the longest, so the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._exempt = 0
        """Leading characters of ``_held`` in which no match may end."""
        self.matched: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """Text that is certain to belong to the answer. After a match, ``matched`` says which.

        ``may_stop`` False: no match ends within this piece (min_tokens is not reached).
        """
        if not self._stops:
            return text
        self._held += text
        if not may_stop:
            self._exempt = len(self._held)
        else:
            end, stop = self._first_match()
            if stop is not None:
                self.matched = stop
                return self._held[: end if self._include else end - len(stop)]
        keep = self._longest_beginning()
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._exempt = max(0, self._exempt - len(certain))
        return certain

    def flush(self) -> str:
        """What is still held, at the answer's end."""
        held, self._held = self._held, ""
        return held

    def _first_match(self) -> tuple[int, str | None]:
        best_end, best = 0, None
        for stop in self._stops:
            at = self._held.find(stop, max(0, self._exempt - len(stop) + 1))
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or end < best_end or (end == best_end and len(stop) > len(best)):
                best_end, best = end, stop
        return best_end, best

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class _Answer:
    """One of a prompt's answers while it grows."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        self.request = request
        params = request.sampling
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.prompt_token_ids, params.skip_special_tokens
        )
        self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output)
        wants = params.logprobs is not None
        self._logprobs: list[TokenLogprobs] | None = [] if wants else None
        self.output = CompletionOutput(
            index=index, token_ids=[], logprobs=self._logprobs, cumulative_logprob=0.0 if wants else None
        )

    def start_round(self) -> None:
        """Nothing is new yet."""
        if self.output.new_token_ids or self.output.delta:
            self.output = msgspec.structs.replace(self.output, delta="", new_token_ids=(), new_logprobs=())

    def apply(self, update: RequestUpdate) -> bool:
        """Take an update in; True when a stop string ended the answer, which the executor does not know."""
        params, output = self.request.sampling, self.output
        deltas = []
        ids = update.new_token_ids
        used = len(ids)
        for i, token in enumerate(ids):
            output.token_ids.append(token)
            # A stop token is reported, but its text is no part of the answer.
            silent = update.finish_reason == "stop" and i == len(ids) - 1
            if not silent or params.include_stop_str_in_output:
                text = self._detokenizer.push((token,))
                deltas.append(self._matcher.push(text, len(output.token_ids) > params.min_tokens))
            if self._matcher.matched is not None:
                used = i + 1
                break
        reason, stop_reason = update.finish_reason, update.stop_reason
        if reason is not None and self._matcher.matched is None:
            deltas.append(self._matcher.push(self._detokenizer.finish(), reason in ("stop", "length")))
        matched = self._matcher.matched
        if matched is None and reason is not None:
            deltas.append(self._matcher.flush())
        elif matched is not None:
            reason, stop_reason = "stop", matched
        delta = "".join(deltas)
        new_logprobs = update.logprobs[:used]
        cumulative = output.cumulative_logprob
        if self._logprobs is not None:
            self._logprobs += new_logprobs
            assert cumulative is not None
            cumulative += sum(entry.logprobs[0] for entry in new_logprobs)
        self.output = msgspec.structs.replace(
            output,
            text=output.text + delta,
            delta=output.delta + delta,
            new_token_ids=output.new_token_ids + ids[:used],
            new_logprobs=output.new_logprobs + new_logprobs,
            cumulative_logprob=cumulative,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=update.error,
        )
        return matched is not None and update.finish_reason is None


class _Group:
    """A prompt and its answers."""

    def __init__(self, request_id: str, prompt: str | None, answers: list[_Answer]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.answers = answers
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_cached_tokens = 0
        self.queue_time = 0.0

    @property
    def finished(self) -> bool:
        return all(answer.output.finish_reason is not None for answer in self.answers)

    def snapshot(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.answers[0].request.prompt_token_ids,
            outputs=[answer.output for answer in self.answers],
            prompt_logprobs=self.prompt_logprobs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            queue_time=self.queue_time,
        )


class OutputProcessor:
    """All prompts of one front end that are in flight."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._by_answer: dict[str, tuple[_Group, _Answer]] = {}

    def __len__(self) -> int:
        """Prompts in flight."""
        return len(self._groups)

    def add(self, request_id: str, requests: Sequence[Request], prompt: str | None = None) -> None:
        """Follow the ``requests`` that ``validation.resolve_requests`` made of one prompt."""
        assert request_id not in self._groups, f"request id {request_id!r} is in use"
        answers = [_Answer(request, i, self._tokenizer) for i, request in enumerate(requests)]
        group = self._groups[request_id] = _Group(request_id, prompt, answers)
        self._by_answer.update({answer.request.request_id: (group, answer) for answer in answers})

    def process(self, updates: Iterable[RequestUpdate]) -> tuple[list[RequestOutput], list[str]]:
        """One output per prompt that ``updates`` touch, and the ids of requests to abort. Updates of
        unknown requests (ended here already) are ignored."""
        touched: dict[str, _Group] = {}
        aborts = []
        for update in updates:
            entry = self._by_answer.get(update.request_id)
            if entry is None:
                continue
            group, answer = entry
            if group.request_id not in touched:
                touched[group.request_id] = group
                for other in group.answers:
                    other.start_round()
            if update.prompt_logprobs is not None and group.prompt_logprobs is None:
                group.prompt_logprobs = list(update.prompt_logprobs)
            group.num_cached_tokens = group.num_cached_tokens or update.num_cached_tokens
            group.queue_time = group.queue_time or update.queue_time
            if answer.apply(update):
                aborts.append(update.request_id)
            if answer.output.finish_reason is not None:
                del self._by_answer[update.request_id]
        outputs = []
        for request_id, group in touched.items():
            outputs.append(group.snapshot())
            if group.finished:
                del self._groups[request_id]
        return outputs, aborts

    def request_ids(self, request_id: str) -> list[str]:
        """The executor's ids of a prompt's unfinished answers: what to abort when its client leaves."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        return [answer.request.request_id for answer in group.answers if answer.output.finish_reason is None]

    def forget(self, request_id: str) -> None:
        """Drop a prompt whose client has left."""
        group = self._groups.pop(request_id, None)
        for answer in group.answers if group else ():
            self._by_answer.pop(answer.request.request_id, None)
