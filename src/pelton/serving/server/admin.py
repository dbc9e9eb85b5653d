"""What changes a running server; there only with ``--enable-refit``."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from pelton.errors import RequestError
from pelton.serving.engine_cache import classify
from pelton.serving.server.protocol import RefitBody
from pelton.serving.server.responses import json_response
from pelton.serving.server.service import CurrentService, body_of, schema_of, warn_unknown

router = APIRouter()


@router.post("/engine/refit", openapi_extra=schema_of(RefitBody))
async def refit(service: CurrentService, body: Annotated[RefitBody, Depends(body_of(RefitBody))]) -> Response:
    """New weights for the model: from a checkpoint or an engine on the server's machine.

    Answers when they run. Until then, and when they are refused, the old ones serve; requests in flight
    go on, and what they have is computed again."""
    service.check_ready()
    if classify(body.path) == "hub":
        raise RequestError(f"{body.path!r} is no path on the server's machine.", param="path")
    started = time.monotonic()
    epoch = await service.llm.refit(body.path, names=body.names or ())
    answer = {"weight_epoch": epoch, "seconds": round(time.monotonic() - started, 3)}
    return json_response(answer, headers=warn_unknown(sorted(body.model_extra or {})))
