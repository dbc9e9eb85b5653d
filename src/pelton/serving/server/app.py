"""The FastAPI application: middleware, error shape, routes."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import pelton
from pelton.serving.async_llm import AsyncLLM
from pelton.serving.server import admin, chat, completions, info
from pelton.serving.server.errors import install_handlers
from pelton.serving.server.metrics import ServerMetrics
from pelton.serving.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from pelton.serving.server.service import Service
from pelton.serving.server.settings import ServerSettings


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The HTTP face of ``llm``, which it does not close."""
    app = FastAPI(
        title="Pelton", version=pelton.__version__, description="OpenAI-compatible server of one model."
    )
    metrics = ServerMetrics(llm.stats)
    llm.observer = metrics
    app.state.service = Service(llm=llm, settings=settings, metrics=metrics)
    install_handlers(app)
    # Innermost first: the body is limited after the key has been checked, CORS headers are on errors too.
    app.add_middleware(BodyLimitMiddleware, limit=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    for routes in (chat.router, completions.router, info.router):
        app.include_router(routes)
    if settings.enable_refit:
        app.include_router(admin.router)
    return app
