"""``AsyncLLM``: a model for asynchronous programs; the server is one of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, overload

import msgspec

from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig, EngineConfig
from pelton.errors import QueueFullError, RequestError
from pelton.runtime.client import ExecutorClient, Health
from pelton.runtime.request import RequestOutput, RequestUpdate, SamplingParams
from pelton.runtime.stats import ExecutorStats
from pelton.runtime.tokenizer import Tokenizer
from pelton.serving.engine_cache import resolve_model
from pelton.serving.front_end import ChatMessage, Chunk, FrontEnd, Generation, Prompt, new_id
from pelton.serving.loading import executor_spec
from pelton.serving.new_weights import NewWeights, Weights
from pelton.serving.overrides import apply_overrides


class Observer(Protocol):
    """Told how long requests take; the server's metrics."""

    def queued(self, seconds: float) -> None:
        """Waited before the first step."""

    def first_token(self, seconds: float) -> None:
        """From arrival to the first token."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` tokens came ``seconds`` after the ones before."""

    def finished(self, seconds: float, reason: str) -> None:
        """From arrival to the end."""


class AsyncLLM:
    """A model whose answers are awaited or streamed; any number at a time.

    ``model`` is what ``LLM`` takes. The executor runs in a thread of this process; use
    ``await AsyncLLM.start(engine)`` for one in its own process, as the server does. Raises what ``LLM``
    raises.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        build: BuildConfig | None = None,
        threads: int | None = None,
        max_waiting: int = 256,
        trust: bool = False,
    ) -> None:
        from pelton.runtime.client_thread import ThreadClient

        build = build or BuildConfig()
        resolved = resolve_model(model, build)
        engine = open_engine(resolved.engine)
        config = (
            apply_overrides(engine.config, build, engine.path) if resolved.given_as_engine else engine.config
        )
        given = build if threads is None else msgspec.structs.replace(build, threads=threads)
        spec = executor_spec(engine, config, given, max_waiting, trust=trust)
        self._setup(
            Tokenizer.from_dir(engine.tokenizer_path),
            config,
            ThreadClient(spec.open(engine)),
            max_waiting,
            engine.path,
        )

    @classmethod
    async def start(
        cls,
        engine: Path,
        *,
        overrides: BuildConfig | None = None,
        max_waiting: int = 256,
        session: str | None = None,
        trust: bool = False,
    ) -> AsyncLLM:
        """Open ``engine`` with its executor in a process of its own (``session``: see ``ExecutorSpec``)."""
        from pelton.runtime.client_process import ProcessClient

        overrides = overrides or BuildConfig()
        opened = open_engine(engine)
        config = apply_overrides(opened.config, overrides, engine)
        spec = executor_spec(opened, config, overrides, max_waiting, session, trust)
        tokenizer = Tokenizer.from_dir(opened.tokenizer_path)
        # The tokenizer loads here while the weights load there. (``gather`` would not wait for the
        # process to end when this is cancelled.)
        loaded = asyncio.ensure_future(asyncio.to_thread(lambda: tokenizer.backend))
        try:
            client = await ProcessClient.start(spec)
        except BaseException:
            loaded.cancel()
            raise
        try:
            await loaded
        except BaseException:
            await client.close()
            raise
        self = cls.__new__(cls)
        self._setup(tokenizer, config, client, max_waiting, opened.path)
        return self

    def _setup(
        self,
        tokenizer: Tokenizer,
        config: EngineConfig,
        client: ExecutorClient,
        max_waiting: int,
        engine: Path,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_waiting = max_waiting
        self.observer: Observer | None = None
        self._client = client
        self._front = FrontEnd(tokenizer, config, client.max_request_tokens)
        assert config.build.max_batch_size is not None
        self._capacity = config.build.max_batch_size + max_waiting
        self._in_flight = 0
        self._weights = NewWeights(engine)
        self._refitting = asyncio.Lock()

    # What it is and how it does.

    @property
    def model_id(self) -> str:
        """The checkpoint's own name."""
        return self.config.model.name

    @property
    def max_request_tokens(self) -> int:
        """Most tokens, prompt and answer, of one request."""
        return self._front.max_request_tokens

    @property
    def in_flight(self) -> int:
        """Answers being computed or waiting."""
        return self._in_flight

    @property
    def is_full(self) -> bool:
        """True when a request would be refused with ``QueueFullError``."""
        return self._in_flight >= self._capacity

    def stats(self) -> ExecutorStats:
        """The executor's counters."""
        return self._client.stats()

    def health(self) -> Health:
        """Whether the executor makes progress."""
        return self._client.health()

    # For programs.

    def sampling_params(self, **given: Any) -> SamplingParams:
        """``SamplingParams`` with the model's own recommendations where nothing is given."""
        return self._front.sampling_params(**given)

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> AsyncIterator[Chunk]: ...

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, stream: Literal[False] = False
    ) -> Coroutine[Any, Any, RequestOutput]: ...

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, stream: bool = False
    ) -> AsyncIterator[Chunk] | Coroutine[Any, Any, RequestOutput]:
        """Continue ``prompt`` (text or token ids): ``await`` the output, or with ``stream=True`` iterate
        over chunks. Leaving the iteration, or cancelling, aborts."""
        chunks = self._stream(prompt, None, sampling_params)
        return chunks if stream else _last(chunks)

    @overload
    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> AsyncIterator[Chunk]: ...

    @overload
    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Coroutine[Any, Any, RequestOutput]: ...

    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> AsyncIterator[Chunk] | Coroutine[Any, Any, RequestOutput]:
        """Answer a conversation through the model's chat template; as ``generate``."""
        chunks = self._stream(None, messages, sampling_params)
        return chunks if stream else _last(chunks)

    async def _stream(
        self, prompt: Prompt | None, messages: Sequence[ChatMessage] | None, params: SamplingParams | None
    ) -> AsyncIterator[Chunk]:
        params = params or self.sampling_params()
        if messages is not None:
            generation = await self._prepare_chat(messages, params)
        else:
            assert prompt is not None
            generation = await asyncio.to_thread(self._front.prepare, [prompt], [params])
        async with self.submit(generation) as chunks:
            async for chunk in chunks:
                yield chunk

    async def refit(self, weights: Weights, *, names: Sequence[str] = ()) -> int:
        """As ``LLM.refit``; the new weights are prepared in a thread while the old ones serve.

        When replacing them fails half-way, the executor stops and everything else raises
        ``NotReadyError``."""
        async with self._refitting:
            engine = await asyncio.to_thread(self._weights.prepare, weights, names)
            epoch = await self._client.update_weights(engine)
            self._weights.adopt(engine)
            return epoch

    # For the server, which checks and tokenises before it answers anything.

    def new_id(self) -> str:
        """A fresh request id."""
        return new_id()

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """``FrontEnd.encode`` in a thread."""
        return await asyncio.to_thread(self._front.encode, text, add_special_tokens)

    async def prepare(
        self, prompts: Sequence[Prompt], fields: Mapping[str, Any], **options: Any
    ) -> Generation:
        """``FrontEnd.prepare`` in a thread, all prompts with the same sampling ``fields``."""
        params = self.sampling_params(**fields)
        return await asyncio.to_thread(
            lambda: self._front.prepare(prompts, [params] * len(prompts), **options)
        )

    async def prepare_chat(
        self,
        messages: Sequence[ChatMessage],
        fields: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """The same for one conversation."""
        return await self._prepare_chat(
            messages,
            self.sampling_params(**fields),
            {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "template_variables": template_variables,
            },
            **options,
        )

    async def _prepare_chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        def work() -> Generation:
            text = self._front.render_chat(messages, **(template or {}))
            return self._front.prepare([text], [params], add_special_tokens=False, **options)

        return await asyncio.to_thread(work)

    def submit(self, generation: Generation) -> ChunkStream:
        """Queue all requests of ``generation`` and stream its chunks.

        Raises ``QueueFullError`` when more wait than ``max_waiting``, ``RequestError`` when the
        generation alone is more than that, ``NotReadyError`` when the executor has stopped."""
        count = len(generation.requests)
        if count > self._capacity:
            raise RequestError(
                f"the request asks for {count} answers at once; this server takes up to {self._capacity}.",
                param="n",
            )
        if self._in_flight + count > self._capacity:
            raise QueueFullError(f"{self._in_flight} answers are in flight or waiting; try again later.")
        updates = self._client.submit(generation.requests)
        self._in_flight += count
        return ChunkStream(self, generation, updates)

    def _release(self, generation: Generation) -> None:
        for request_id in generation.unfinished():
            self._client.abort(request_id)
        self._in_flight -= len(generation.requests)

    # The end.

    async def close(self) -> None:
        """Stop the executor; open streams end with ``NotReadyError``."""
        await self._client.close()
        self._weights.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class ChunkStream:
    """Chunks of one generation. ``aclose`` (or leaving ``async with``) aborts what has not ended."""

    def __init__(self, llm: AsyncLLM, generation: Generation, updates: AsyncIterator[RequestUpdate]) -> None:
        self.generation = generation
        self._llm = llm
        self._updates = updates
        self._closed = False
        self._arrival = generation.requests[0].arrival_time
        self._last_token: dict[str, float] = {}

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            try:
                update = await anext(self._updates)
            except StopAsyncIteration:
                await self.aclose()
                raise
            chunk, aborts = self.generation.take(update)
            for request_id in aborts:
                self._llm._client.abort(request_id)
            if chunk is not None:
                if self._llm.observer is not None:
                    self._observe(self._llm.observer, update, chunk)
                return chunk

    def _observe(self, observer: Observer, update: RequestUpdate, chunk: Chunk) -> None:
        now = time.monotonic()
        if update.new_token_ids:
            before = self._last_token.get(update.request_id)
            self._last_token[update.request_id] = now
            if before is None:
                observer.queued(update.queue_time)
                observer.first_token(now - self._arrival)
            else:
                observer.next_tokens(now - before, len(update.new_token_ids))
        if chunk.finish_reason is not None:
            observer.finished(now - self._arrival, chunk.finish_reason)

    async def aclose(self) -> None:
        """Abort what has not ended; idempotent."""
        if not self._closed:
            self._closed = True
            if self._llm.observer is not None:
                for _ in self.generation.unfinished():
                    self._llm.observer.finished(time.monotonic() - self._arrival, "abort")
            self._llm._release(self.generation)

    async def __aenter__(self) -> ChunkStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _last(chunks: AsyncIterator[Chunk]) -> RequestOutput:
    output = None
    async for chunk in chunks:
        output = chunk.output
    assert output is not None, "a generation has at least one chunk"
    return output
