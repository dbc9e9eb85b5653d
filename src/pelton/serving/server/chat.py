"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from pelton.errors import RequestError
from pelton.runtime.request import CompletionOutput, RequestOutput, TokenLogprobs
from pelton.runtime.tokenizer import Tokenizer
from pelton.serving.async_llm import ChunkStream
from pelton.serving.server.logprobs import chat_logprobs
from pelton.serving.server.protocol import ChatBody, chat_messages, refuse_unsupported
from pelton.serving.server.responses import EventStream, collect, json_response, usage
from pelton.serving.server.service import CurrentService, Service, body_of, schema_of, warn_unknown

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=schema_of(ChatBody))
async def create_chat_completion(
    request: Request, service: CurrentService, body: Annotated[ChatBody, Depends(body_of(ChatBody))]
) -> Response:
    """Answer a conversation; OpenAI's chat completion object, or a stream of its chunks."""
    stream = await _start(service, body)
    headers = warn_unknown(body.unknown_fields())
    answer = _Answer(service, body, stream.generation.request_id)
    if body.stream:
        return EventStream(answer.events(stream), stream.aclose, headers)
    outputs = await collect(request, stream)
    return json_response(answer.complete(outputs[0]), headers=headers)


async def _start(service: Service, body: ChatBody) -> ChunkStream:
    """Check, render, tokenise and submit. Raises before anything is sent."""
    service.check_model(body.model)
    refuse_unsupported(body)
    service.check_limits(body)
    messages = chat_messages(body.messages)
    fields = body.sampling_fields()
    if body.max_completion_tokens is not None:
        if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise RequestError(
                "max_tokens and max_completion_tokens differ; send only max_completion_tokens.",
                param="max_completion_tokens",
            )
        fields["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    service.check_ready()
    generation = await service.llm.prepare_chat(
        messages,
        fields,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_variables=body.chat_template_kwargs,
        request_id="chatcmpl-" + service.llm.new_id(),
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    return service.llm.submit(generation)


class _Answer:
    """Builds the objects of one response."""

    def __init__(self, service: Service, body: ChatBody, request_id: str) -> None:
        self.tokenizer: Tokenizer = service.llm.tokenizer
        self.body = body
        self.head = {"id": request_id, "created": int(time.time()), "model": service.model_id}

    def _logprobs(self, positions: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.tokenizer, positions or (), self.body.top_logprobs or 0)

    def complete(self, output: RequestOutput) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(answer) for answer in output.outputs],
            "usage": usage([output]),
            **prompt_extras(self.body.prompt_logprobs, self.body.return_token_ids, output),
        }

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    async def events(self, stream: ChunkStream) -> AsyncIterator[dict[str, Any]]:
        """``chat.completion.chunk`` objects: the role, then text, then the reason, then usage."""
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        head = {**self.head, "object": "chat.completion.chunk"}
        if with_usage:
            head["usage"] = None
        count = stream.generation.answers_per_prompt[0]
        for index in range(count):
            yield {**head, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
        async for chunk in stream:
            delta = {"content": chunk.delta} if chunk.delta else {}
            choice = _delta(chunk.index, delta)
            if chunk.logprobs:
                choice["logprobs"] = self._logprobs(chunk.logprobs)
            if self.body.return_token_ids:
                choice["token_ids"] = chunk.token_ids
            choice["finish_reason"] = chunk.finish_reason
            if chunk.finish_reason is not None:
                choice["stop_reason"] = chunk.stop_reason
            elif not chunk.delta and not chunk.logprobs and not self.body.return_token_ids:
                continue  # a token whose text is still held back
            yield {**head, "choices": [choice]}
        if with_usage:
            yield {**head, "choices": [], "usage": usage(stream.generation.outputs)}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def prompt_extras(prompt_logprobs: int | None, token_ids: bool, output: RequestOutput) -> dict[str, Any]:
    """Pelton's extras about the prompt, when asked for."""
    extras: dict[str, Any] = {}
    if prompt_logprobs is not None:
        extras["prompt_logprobs"] = [
            None if p is None else {str(t): v for t, v in zip(p.token_ids, p.logprobs, strict=True)}
            for p in output.prompt_logprobs or ()
        ]
    if token_ids:
        extras["prompt_token_ids"] = output.prompt_token_ids
    return extras
