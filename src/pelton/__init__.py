"""Pelton: build an LLM checkpoint into an engine once, serve it at once.

Names are imported on first use: ``import pelton`` itself loads neither torch nor the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pelton.version import __version__

_LAZY = {
    "LLM": "pelton.serving.llm",
    "AsyncLLM": "pelton.serving.async_llm",
    "SamplingParams": "pelton.runtime.request",
    "RequestOutput": "pelton.runtime.request",
    "CompletionOutput": "pelton.runtime.request",
    "BuildConfig": "pelton.engine.config",
    "OptimizationProfile": "pelton.engine.shapes",
    "DimRange": "pelton.engine.shapes",
    "Session": "pelton.engine.session",
    "build": "pelton.builder.build",
    "quantize": "pelton.builder.write_quantized",
    "QuantConfig": "pelton.quant.config",
    "refit": "pelton.builder.refit",
    "strip": "pelton.builder.strip",
    "register_model": "pelton.models.registry",
    "op": "pelton.kernels.user_op",
    "tactic": "pelton.kernels.user_tactic",
    "PeltonError": "pelton.errors",
}

__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:
    from pelton.builder.build import build as build
    from pelton.builder.refit import refit as refit
    from pelton.builder.strip import strip as strip
    from pelton.builder.write_quantized import quantize as quantize
    from pelton.engine.config import BuildConfig as BuildConfig
    from pelton.engine.session import Session as Session
    from pelton.engine.shapes import DimRange as DimRange
    from pelton.engine.shapes import OptimizationProfile as OptimizationProfile
    from pelton.errors import PeltonError as PeltonError
    from pelton.kernels.user_op import op as op
    from pelton.kernels.user_tactic import tactic as tactic
    from pelton.models.registry import register_model as register_model
    from pelton.quant.config import QuantConfig as QuantConfig
    from pelton.runtime.request import CompletionOutput as CompletionOutput
    from pelton.runtime.request import RequestOutput as RequestOutput
    from pelton.runtime.request import SamplingParams as SamplingParams
    from pelton.serving.async_llm import AsyncLLM as AsyncLLM
    from pelton.serving.llm import LLM as LLM


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'pelton' has no attribute {name!r}")
