"""What an operator can set of a server, beyond the engine and the address."""

from __future__ import annotations

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and names of one server."""

    model_ids: tuple[str, ...]
    """Names under which the model is served; the first is reported in answers."""
    api_keys: tuple[str, ...] = ()
    """Accepted bearer tokens; empty: no authentication."""
    max_body_bytes: int = 16 << 20
    """Largest request body."""
    max_n: int = 16
    """Most answers per prompt."""
    max_prompts: int = 256
    """Most prompts in one completion request."""
    max_logprobs: int = 20
    """Most alternatives reported per token."""
    enable_refit: bool = False
    """Take new weights over ``POST /engine/refit``."""
    allow_origins: tuple[str, ...] = ()
    """Origins that browsers may call from (CORS)."""
