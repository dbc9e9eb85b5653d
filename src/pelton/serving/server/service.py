"""What routes share: the model behind the server, reading bodies, and how requests are checked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from pelton.errors import ModelNotFoundError, NotReadyError, RequestError
from pelton.serving.async_llm import AsyncLLM
from pelton.serving.server.errors import sentence_of
from pelton.serving.server.metrics import ServerMetrics
from pelton.serving.server.protocol import ChatBody, CompletionBody
from pelton.serving.server.settings import ServerSettings

log = logging.getLogger("pelton.server")

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Service:
    """One server's model, limits and counters; ``app.state.service``."""

    llm: AsyncLLM
    settings: ServerSettings
    metrics: ServerMetrics

    @property
    def model_id(self) -> str:
        """The name answers carry."""
        return self.settings.model_ids[0]

    def check_model(self, name: str | None) -> None:
        """Raise ``ModelNotFoundError`` for a model that is not served here."""
        if name is not None and name not in self.settings.model_ids:
            raise ModelNotFoundError(
                f"The model {name!r} is not served here; served: {', '.join(self.settings.model_ids)}.",
                param="model",
                code="model_not_found",
            )

    def check_ready(self) -> None:
        """Raise ``NotReadyError`` when the executor is dead or stuck."""
        health = self.llm.health()
        if not health.ok:
            raise NotReadyError(health.detail)

    def check_limits(self, body: CompletionBody | ChatBody) -> None:
        """Raise ``RequestError`` for counts above this server's limits."""
        if (body.n or 1) > self.settings.max_n:
            raise RequestError(
                f"n {body.n} is above this server's limit of {self.settings.max_n}.", param="n"
            )
        for field in ("logprobs", "top_logprobs", "prompt_logprobs"):
            value = getattr(body, field, None)
            if isinstance(value, int) and value > self.settings.max_logprobs:
                raise RequestError(
                    f"{field} {value} is above this server's limit of {self.settings.max_logprobs}.",
                    param=field,
                )


def get_service(request: Request) -> Service:
    """FastAPI dependency."""
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(get_service)]


def body_of(kind: type[B]) -> Callable[[Request], Any]:
    """FastAPI dependency that reads the body as ``kind``; errors name the field in one sentence."""

    async def read(request: Request) -> B:
        raw = await request.body()
        if not raw.strip():
            raise RequestError("The body is empty; send a JSON object.")
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            raise sentence_of(error) from None

    return read


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` for a route whose body is read by ``body_of``."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": kind.model_json_schema()}},
        }
    }


def warn_unknown(fields: list[str]) -> dict[str, str]:
    """Headers that say which fields of a body were ignored; logged too."""
    if not fields:
        return {}
    text = ", ".join(fields)[:200].encode("ascii", "replace").decode().replace('"', "'")
    text = "".join(c if c.isprintable() else "?" for c in text)
    log.warning("ignored unknown request fields: %s", text)
    return {"Warning": f'299 pelton "ignored unknown fields: {text}"'}
