"""OpenAI's error shape for everything that can go wrong: one object, its status codes, never 422."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pelton.errors import PeltonError, RequestError

log = logging.getLogger("pelton.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error response."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error as a response; 429 and 503 say when to come back."""
    headers = dict(headers or {})
    if status in (429, 503):
        headers.setdefault("Retry-After", "1")
    body = msgspec.json.encode(error_object(status, message, param=param, code=code))
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def from_exception(error: Exception) -> Response:
    """The response to ``error``; what we did not foresee is a 500 without its text (it is logged)."""
    if isinstance(error, RequestError):
        return error_response(error.http_status, str(error), param=error.param, code=error.code)
    if isinstance(error, PeltonError):
        return error_response(error.http_status, str(error))
    log.error("unexpected error", exc_info=error)
    return error_response(500, "The server failed on this request; its log has the details.")


def sentence_of(error: ValidationError) -> RequestError:
    """A pydantic error as our sentence, naming the field as it is written in JSON."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", "")) or "it cannot be parsed"
        return RequestError(f"The body is not valid JSON: {reason}.")
    path, union = "", False
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_BRANCHES or "[" in part:
            union = True
            break  # pydantic's name of a union branch, not a field
        else:
            path += f".{part}" if path else part
    if not path:
        return RequestError("The body must be a JSON object.")
    if first["type"] == "missing":
        return RequestError(f"{path} is missing.", param=path)
    if union:
        forms = next((text for field, text in _FORMS.items() if path.endswith(field)), "of another type")
        return RequestError(f"{path} must be {forms}.", param=path)
    wanted = _WANTED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
    got = repr(first.get("input"))
    return RequestError(f"{path} must be {wanted}, not {got[:40]}.", param=path)


_UNION_BRANCHES = {"str", "int", "float", "bool"}
_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_FORMS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of text parts",
    "tool_choice": "a string or an object",
    "function_call": "a string or an object",
}


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def install_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` take OpenAI's shape."""

    @app.exception_handler(PeltonError)
    async def on_pelton_error(request: Request, error: PeltonError) -> Response:
        return from_exception(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 404:
            return error_response(404, f"There is no {request.method} {request.url.path} here.")
        if error.status_code == 405:
            allowed = headers.get("Allow") or headers.get("allow") or "another method"
            return error_response(
                405, f"{request.url.path} does not take {request.method}; use {allowed}.", headers=headers
            )
        return error_response(error.status_code, str(error.detail), headers=headers)

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(ClientGoneError)
    async def on_client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        return from_exception(error)
