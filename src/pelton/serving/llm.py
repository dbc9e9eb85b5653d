"""``LLM``: a model in one object, for scripts. The executor runs in the caller's own thread.

No thread, no event loop, no asyncio import: ``pelton run`` answers sooner for it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import msgspec

from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.errors import NotReadyError, PeltonError, RequestError
from pelton.runtime.executor_spec import close_executor
from pelton.runtime.request import RequestOutput, RequestUpdate, SamplingParams
from pelton.runtime.stats import ExecutorStats
from pelton.runtime.tokenizer import Tokenizer
from pelton.serving.engine_cache import resolve_model
from pelton.serving.front_end import ChatMessage, Chunk, FrontEnd, Generation, Prompt
from pelton.serving.loading import executor_spec
from pelton.serving.new_weights import NewWeights, Weights
from pelton.serving.overrides import apply_overrides

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that answers. ``model`` is an engine directory, a Hugging Face folder, a GGUF file or a hub
    id; anything but an engine is built once and kept in the user's cache.

    - ``build``: settings of the engine, where one is built; for an engine, limits to run below;
    - ``threads``: CPU threads (all cores, or as built);
    - ``progress``: told how a build goes (``pelton.build``);
    - ``trust``: run code that an engine carries although it was not built here;
    - ``notify``: told in a sentence what takes time.

    Raises ``CheckpointError``, ``EngineError`` or ``ConfigError``. Close it, or use it in a ``with``.
    Calls from several threads share the model; each waits for its own answers.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        build: BuildConfig | None = None,
        threads: int | None = None,
        progress: Any = None,
        notify: Callable[[str], None] | None = None,
        session: str | None = None,
        trust: bool = False,
    ) -> None:
        build = build or BuildConfig()
        resolved = resolve_model(model, build, progress=progress, notify=notify)
        engine = open_engine(resolved.engine)
        self.config = (
            apply_overrides(engine.config, build, engine.path) if resolved.given_as_engine else engine.config
        )
        """Limits as they hold here."""
        given = build if threads is None else msgspec.structs.replace(build, threads=threads)
        spec = executor_spec(engine, self.config, given, 1 << 30, session, trust)
        self.tokenizer = Tokenizer.from_dir(engine.tokenizer_path)
        self._executor = spec.open(engine)
        self._front = FrontEnd(self.tokenizer, self.config, self._executor.max_request_tokens)
        self._lock = threading.Lock()
        self._refitting = threading.Lock()
        self._weights = NewWeights(engine.path)
        self._failure = ""
        self._inboxes: dict[str, deque[RequestUpdate]] = {}
        self._closed = False

    @property
    def model_id(self) -> str:
        """The checkpoint's own name."""
        return self.config.model.name

    def stats(self) -> ExecutorStats:
        """The executor's counters."""
        return self._executor.stats()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """``SamplingParams`` with the model's own recommendations where nothing is given."""
        return self._front.sampling_params(**given)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> list[RequestOutput]:
        """Continue one prompt or many (text or token ids), batched; outputs in order.

        ``sampling_params``: one for all, or one for each; None: the model's recommendations.
        Raises ``RequestError`` before anything runs when one of them is invalid.
        """
        many = _prompts(prompts)
        return self._complete(self._front.prepare(many, self._params(sampling_params, len(many))))

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many through the model's chat template; as ``generate``."""
        many = _conversations(messages)
        texts = [self._front.render_chat(conversation) for conversation in many]
        params = self._params(sampling_params, len(texts))
        return self._complete(self._front.prepare(texts, params, add_special_tokens=False))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[Chunk, None, None]:
        """Continue one prompt, chunk by chunk. Closing the generator aborts."""
        return self._chunks(self._front.prepare([prompt], self._params(sampling_params, 1)))

    def stream_chat(
        self, messages: Sequence[ChatMessage], sampling_params: SamplingParams | None = None
    ) -> Generator[Chunk, None, None]:
        """Answer one conversation, chunk by chunk. Closing the generator aborts."""
        text = self._front.render_chat(messages)
        params = self._params(sampling_params, 1)
        return self._chunks(self._front.prepare([text], params, add_special_tokens=False))

    def refit(self, weights: Weights, *, names: Sequence[str] = ()) -> int:
        """Run new weights from now on: of a checkpoint or engine, or arrays by Hugging Face tensor name.

        ``names``: patterns; only these weights of a checkpoint are replaced. Answers that are being made
        go on: their tokens are computed again with the new weights, and no cached prefix is used any
        more. Returns how often the weights have been replaced.

        Raises ``CheckpointError``, ``EngineError`` or ``ConfigError``, and then the old weights stay.
        """
        with self._refitting:
            self._check_open()
            engine = self._weights.prepare(weights, names)
            with self._lock:
                self._check_open()
                try:
                    with _uninterrupted():
                        self._executor.update_weights(engine)
                except PeltonError:
                    raise
                except Exception as error:
                    self._failure = f"the weights could not be replaced: {type(error).__name__}: {error}"
                    raise NotReadyError(self._failure) from error
            self._weights.adopt(engine)
            return self._executor.stats().weight_epoch

    def close(self) -> None:
        """Free the model; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                close_executor(self._executor)
                self._weights.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(self, given: Params, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, list | tuple) or not all(isinstance(p, SamplingParams) for p in given):
            raise RequestError(
                f"sampling_params is {given!r:.60}; give a SamplingParams, or a list of one for each prompt.",
                param="sampling_params",
            )
        if len(given) != count:
            raise RequestError(
                f"there are {count} prompts and {len(given)} sampling_params; give one for all, or one each.",
                param="sampling_params",
            )
        return list(given)

    def _complete(self, generation: Generation) -> list[RequestOutput]:
        for _ in self._chunks(generation):
            pass
        return generation.outputs

    def _chunks(self, generation: Generation) -> Generator[Chunk, None, None]:
        """Run ``generation``. Whoever waits for an answer runs the steps that make it: each step's
        updates go to the inboxes of their calls, so interleaved and threaded calls share every step."""
        inbox: deque[RequestUpdate] = deque()
        with self._lock:
            self._check_open()
            for request in generation.requests:
                self._executor.add(request)
                self._inboxes[request.request_id] = inbox
        try:
            while not generation.finished:
                if not inbox:
                    with self._lock:
                        if not inbox:
                            self._check_open()
                            self._step()
                    continue
                chunk, aborts = generation.take(inbox.popleft())
                for request_id in aborts:
                    with self._lock:
                        self._executor.abort(request_id)
                if chunk is not None:
                    yield chunk
        finally:
            with self._lock:
                for request in generation.requests:
                    self._inboxes.pop(request.request_id, None)
                if not self._closed:
                    for request_id in generation.unfinished():
                        self._executor.abort(request_id)

    def _step(self) -> None:
        with _uninterrupted():
            for update in self._executor.step():
                inbox = self._inboxes.get(update.request_id)
                if inbox is not None:
                    inbox.append(update)

    def _check_open(self) -> None:
        if self._closed:
            raise NotReadyError("the LLM is closed.")
        if self._failure:
            raise NotReadyError(self._failure)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C, and SIGTERM where it has a handler, take effect after a step: half of one would leave the
    executor inconsistent."""
    held: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        interrupt, end = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        if interrupt is signal.default_int_handler:
            held[signal.SIGINT] = interrupt
        if callable(end):
            held[signal.SIGTERM] = end
    came: list[int] = []
    for number in held:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    for number in came:
        held[number](number, None)


def _prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The forms of ``generate``'s first argument as a list. Raises ``RequestError``."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(
            f"prompts is {given!r:.60}; give a string, a list of token ids, or a list of either.",
            param="prompts",
        )
    prompts = list(given)
    if not prompts:
        raise RequestError("there are no prompts; give at least one.", param="prompts")
    if all(isinstance(p, int) and not isinstance(p, bool) for p in prompts):
        return [tuple(prompts)]  # type: ignore[arg-type]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not (
            isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt)
        ):
            raise RequestError(
                f"prompts[{i}] is {prompt!r:.60}; a prompt is a string or a list of token ids.",
                param="prompts",
            )
    return prompts  # type: ignore[return-value]


def _conversations(
    given: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[Sequence[ChatMessage]]:
    if len(given) and isinstance(given[0], Sequence) and not isinstance(given[0], str):
        return list(given)  # type: ignore[arg-type]
    return [given]  # type: ignore[list-item]
