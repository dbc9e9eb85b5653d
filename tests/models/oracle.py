"""Tiny random checkpoints of every architecture, and the logits ``transformers`` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pelton import nn
from pelton.ir.tensors import HostTensor
from pelton.models.registry import create_model
from tests.models.paged import PagedRunner, run_packed

VOCAB = 61


def make_hf(config_class: Any, model_class: Any, **options: Any) -> Any:
    """A random ``transformers`` model in float32 whose norms and biases are not trivially 1 and 0."""
    torch.manual_seed(3)
    config = config_class(**options)
    config._attn_implementation = "eager"
    model = model_class(config).eval().float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += noise * (0.1 if parameter.ndim == 1 else 0.06)
    return model


def hf_config_dict(hf: Any, **changes: Any) -> dict[str, Any]:
    """What ``save_pretrained`` would write as config.json."""
    config: dict[str, Any] = hf.config.to_dict()
    config["architectures"] = [type(hf).__name__]
    config.update(changes)
    return config


def read_from(state: Mapping[str, torch.Tensor]) -> Callable[[str], HostTensor]:
    """``read`` of a checkpoint that holds ``state``."""

    def read(name: str) -> HostTensor:
        array = np.ascontiguousarray(state[name].numpy())
        return HostTensor("float32", tuple(array.shape), array)

    return read


def load_ours(hf: Any, *, max_seq_len: int = 64, **changes: Any) -> nn.CausalLM:
    """Our model of ``hf``'s configuration with ``hf``'s weights."""
    model = create_model(hf_config_dict(hf, **changes), max_seq_len=max_seq_len)
    assert model.ignored_options == ()
    nn.load_weights(model, read_from(hf.state_dict()))
    return model


def texts(lengths: Sequence[int] = (26, 9, 14)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def hf_logits(hf: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return hf(torch.tensor([list(tokens)])).logits[0].float()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def error_against_hf(
    hf: Any, *, max_seq_len: int = 64, lengths: Sequence[int] = (26, 9, 14), **changes: Any
) -> float:
    """Largest relative error over every token's logits of packed, paged texts.

    ``changes`` to the configuration that our model gets.
    """
    ours = load_ours(hf, max_seq_len=max_seq_len, **changes)
    inputs = texts(lengths)
    errors = []
    for got, tokens in zip(run_packed(PagedRunner(ours), inputs), inputs, strict=True):
        want = hf_logits(hf, tokens)
        assert want.abs().max() > 0.1
        errors.append(relative_error(got, want))
    return max(errors)


def check_against_hf(hf: Any, **options: Any) -> None:
    """Every token's logits within 1e-4 of ``transformers``; options as ``error_against_hf``'s."""
    error = error_against_hf(hf, **options)
    assert error < 1e-4, f"relative error {error:.2e}"
