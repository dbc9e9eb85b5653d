"""What every request passes first: the API key and the body limit. Plain ASGI, so that streams and
disconnects go through untouched."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pelton.errors import UserError
from pelton.serving.server.errors import error_response

#: Probes carry no key.
OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeyMiddleware:
    """401 unless ``Authorization: Bearer`` holds one of the keys (compared in constant time)."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
        # Every key is compared, so that timing does not tell which one is close.
        if sum(secrets.compare_digest(given, key) for key in self._keys):
            await self.app(scope, receive, send)
            return
        message = (
            "The API key is wrong." if given else "This server needs an API key: Authorization: Bearer KEY."
        )
        response = error_response(
            401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )
        await response(scope, receive, send)


class BodyTooLargeError(UserError):
    """The request body exceeds the server's limit."""

    http_status = 413


class BodyLimitMiddleware:
    """413 for bodies over the limit: by their declared length, or while they are read."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message = f"The body is larger than this server's limit of {self._limit} bytes."
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limit:
                await error_response(413, message)(scope, receive, send)
                return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            event = await receive()
            if event["type"] == "http.request":
                seen += len(event.get("body", b""))
                if seen > self._limit:
                    raise BodyTooLargeError(message)  # turned into a response by the app's handlers
            return event

        await self.app(scope, limited, send)
