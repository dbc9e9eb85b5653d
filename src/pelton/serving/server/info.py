"""Everything but generation: models, tokenising, health, version, metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

import pelton
from pelton.errors import RequestError
from pelton.serving.server.errors import error_response
from pelton.serving.server.protocol import DetokenizeBody, TokenizeBody, chat_messages
from pelton.serving.server.responses import json_response
from pelton.serving.server.service import CurrentService, Service, body_of, schema_of, warn_unknown

router = APIRouter()

_STARTED = int(time.time())


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "pelton",
        "root": service.llm.model_id,
        "max_model_len": service.llm.max_request_tokens,
    }


@router.get("/v1/models")
async def list_models(service: CurrentService) -> Response:
    """Names of the model served here."""
    models = [_model(service, name) for name in service.settings.model_ids]
    return json_response({"object": "list", "data": models})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, service: CurrentService) -> Response:
    """One of them."""
    service.check_model(name)
    return json_response(_model(service, name))


@router.post("/tokenize", openapi_extra=schema_of(TokenizeBody))
async def tokenize(
    service: CurrentService, body: Annotated[TokenizeBody, Depends(body_of(TokenizeBody))]
) -> Response:
    """Token ids of ``prompt``, or of ``messages`` through the chat template."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages.", param="prompt")
    tokenizer = service.llm.tokenizer
    if body.messages is not None:
        text = tokenizer.apply_chat_template(
            chat_messages(body.messages), add_generation_prompt=body.add_generation_prompt
        )
        ids = await service.llm.tokenize(text, False)
    else:
        assert body.prompt is not None
        ids = await service.llm.tokenize(body.prompt, body.add_special_tokens is not False)
    answer: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": service.llm.max_request_tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return json_response(answer, headers=warn_unknown(sorted(body.model_extra or {})))


@router.post("/detokenize", openapi_extra=schema_of(DetokenizeBody))
async def detokenize(
    service: CurrentService, body: Annotated[DetokenizeBody, Depends(body_of(DetokenizeBody))]
) -> Response:
    """The text of ``tokens``."""
    service.check_model(body.model)
    size, limit = service.llm.config.model.vocab_size, service.llm.max_request_tokens
    if len(body.tokens) > limit:
        raise RequestError(
            f"tokens has {len(body.tokens)} ids; this server takes up to {limit}.", param="tokens"
        )
    for i, token in enumerate(body.tokens):
        if not 0 <= token < size:
            raise RequestError(
                f"tokens[{i}] is {token}; token ids of this model are 0 to {size - 1}.", param=f"tokens[{i}]"
            )
    text = await asyncio.to_thread(service.llm.tokenizer.decode, body.tokens, body.skip_special_tokens)
    return json_response({"prompt": text}, headers=warn_unknown(sorted(body.model_extra or {})))


@router.get("/health")
async def health(service: CurrentService) -> Response:
    """Liveness: 200 while the executor is alive and makes progress, else 503: restart it."""
    state = service.llm.health()
    return json_response({"status": "ok"}) if state.ok else error_response(503, state.detail)


@router.get("/ready")
async def ready(service: CurrentService) -> Response:
    """Readiness: 200 while new requests are taken, else 503: send them elsewhere."""
    state = service.llm.health()
    if not state.ok:
        return error_response(503, state.detail)
    if service.llm.is_full:
        return error_response(503, "The queue is full.")
    return json_response({"status": "ok"})


@router.get("/version")
async def version() -> Response:
    """Pelton's version."""
    return json_response({"version": pelton.__version__})


@router.get("/metrics")
async def metrics(service: CurrentService) -> Response:
    """Prometheus' text format."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
