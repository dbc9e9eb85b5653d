"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from pelton.errors import RequestError
from pelton.runtime.request import CompletionOutput, RequestOutput, TokenLogprobs
from pelton.serving.async_llm import ChunkStream
from pelton.serving.front_end import Chunk, Prompt
from pelton.serving.server.chat import prompt_extras
from pelton.serving.server.logprobs import completion_logprobs
from pelton.serving.server.protocol import CompletionBody, refuse_unsupported
from pelton.serving.server.responses import EventStream, collect, json_response, usage
from pelton.serving.server.service import CurrentService, Service, body_of, schema_of, warn_unknown

router = APIRouter()

#: OpenAI's default for this endpoint.
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", openapi_extra=schema_of(CompletionBody))
async def create_completion(
    request: Request,
    service: CurrentService,
    body: Annotated[CompletionBody, Depends(body_of(CompletionBody))],
) -> Response:
    """Continue one or several prompts; OpenAI's text completion object, or a stream of them."""
    stream = await _start(service, body)
    headers = warn_unknown(body.unknown_fields())
    answer = _Answer(service, body, stream.generation.request_id)
    if body.stream:
        return EventStream(answer.events(stream), stream.aclose, headers)
    return json_response(answer.complete(await collect(request, stream)), headers=headers)


def prompts_of(body: CompletionBody, max_prompts: int) -> list[Prompt]:
    """The four forms of ``prompt`` as a list of prompts. Raises ``RequestError``."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list; give at least one prompt.", param="prompt")
    if isinstance(prompt[0], int):
        return [tuple(prompt)]  # type: ignore[arg-type]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"prompt has {len(prompt)} prompts; this server takes up to {max_prompts} in one request.",
            param="prompt",
        )
    return [p if isinstance(p, str) else tuple(p) for p in prompt]  # type: ignore[arg-type]


async def _start(service: Service, body: CompletionBody) -> ChunkStream:
    """Check, tokenise and submit. Raises before anything is sent."""
    service.check_model(body.model)
    refuse_unsupported(body)
    service.check_limits(body)
    fields = body.sampling_fields()
    fields.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if body.echo:
        if fields["max_tokens"] == 0:
            fields["max_tokens"] = 1  # scoring a prompt: one token is made and left out
        if body.logprobs is not None:
            fields["prompt_logprobs"] = body.logprobs
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
    service.check_ready()
    generation = await service.llm.prepare(
        prompts_of(body, service.settings.max_prompts),
        fields,
        add_special_tokens=body.add_special_tokens is not False,
        request_id="cmpl-" + service.llm.new_id(),
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    return service.llm.submit(generation)


class _Answer:
    """Builds the objects of one response. Choice ``p * n + i`` is answer i to prompt p."""

    def __init__(self, service: Service, body: CompletionBody, request_id: str) -> None:
        self.tokenizer = service.llm.tokenizer
        self.body = body
        self.n = body.n or 1
        self.prompt_only = bool(body.echo) and body.max_tokens == 0
        self.head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_id,
        }

    def _prompt_text(self, output: RequestOutput) -> str:
        if not self.body.echo:
            return ""
        return output.prompt if output.prompt is not None else self.tokenizer.decode(output.prompt_token_ids)

    def _logprobs(
        self, output: RequestOutput, positions: Sequence[TokenLogprobs] | None, text_offset: int, first: bool
    ) -> dict[str, Any] | None:
        """``positions`` of the answer, after the prompt's when ``first`` and echoed."""
        if self.body.logprobs is None:
            return None
        everything: list[TokenLogprobs | None] = []
        if first and self.body.echo:
            everything += output.prompt_logprobs or ()
            text_offset = 0
        if not self.prompt_only:
            everything += positions or ()
        return completion_logprobs(
            self.tokenizer, everything, output.prompt_token_ids[0], self.body.logprobs, text_offset
        )

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The ``text_completion`` object."""
        choices = [
            self._choice(output, answer, p) for p, output in enumerate(outputs) for answer in output.outputs
        ]
        return {
            **self.head,
            "choices": choices,
            "usage": usage(outputs, prompt_only=self.prompt_only),
        }

    def _choice(self, output: RequestOutput, answer: CompletionOutput, p: int) -> dict[str, Any]:
        prompt = self._prompt_text(output)
        choice: dict[str, Any] = {
            "index": p * self.n + answer.index,
            "text": prompt + ("" if self.prompt_only else answer.text),
            "logprobs": self._logprobs(output, answer.logprobs, len(prompt), True),
            "finish_reason": "length" if self.prompt_only else answer.finish_reason,
            "stop_reason": None if self.prompt_only else answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = [] if self.prompt_only else answer.token_ids
        return choice | prompt_extras(self.body.prompt_logprobs, self.body.return_token_ids, output)

    async def events(self, stream: ChunkStream) -> AsyncIterator[dict[str, Any]]:
        """``text_completion`` objects with the text that came since the last one."""
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        head = {**self.head, "usage": None} if with_usage else self.head
        offsets: dict[int, int] = {}
        async for chunk in stream:
            index = chunk.prompt_index * self.n + chunk.index
            first = index not in offsets
            choice = self._event(chunk, index, first, offsets)
            if choice is not None:
                yield {**head, "choices": [choice]}
        if with_usage:
            outputs = stream.generation.outputs
            yield {**head, "choices": [], "usage": usage(outputs, prompt_only=self.prompt_only)}

    def _event(self, chunk: Chunk, index: int, first: bool, offsets: dict[int, int]) -> dict[str, Any] | None:
        prompt = self._prompt_text(chunk.output) if first else ""
        text = prompt + ("" if self.prompt_only else chunk.delta)
        offset = offsets.get(index, 0)
        if first and not self.body.echo:
            offset = 0
        logprobs = None
        if chunk.logprobs or (first and self.body.echo):
            logprobs = self._logprobs(chunk.output, chunk.logprobs, offset, first)
        offsets[index] = offset + len(text)
        if not text and logprobs is None and chunk.finish_reason is None and not self.body.return_token_ids:
            return None  # a token whose text is still held back
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
        }
        if self.prompt_only and chunk.finish_reason is not None:
            choice["finish_reason"] = "length"
        if chunk.finish_reason is not None:
            choice["stop_reason"] = None if self.prompt_only else chunk.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        return choice
