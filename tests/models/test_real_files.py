"""The real GGUF files: our float32 logits against ``transformers`` with the same dequantised weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf

from pelton import nn
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import Checkpoint, open_checkpoint
from pelton.models.registry import create_model
from tests.models.oracle import relative_error
from tests.models.paged import PagedRunner

Read = Callable[[str], HostTensor]


def dequantised(checkpoint: Checkpoint) -> Read:
    """``read`` that dequantises each tensor once, for both models."""

    @functools.cache
    def read(name: str) -> HostTensor:
        values = dequantize(checkpoint.read(name))
        return HostTensor("float32", values.shape, values)

    return read


def hf_model(checkpoint: Checkpoint, read: Read, config_class: Any, model_class: Any) -> Any:
    """``transformers``' model with every tensor of the file."""
    config = config_class(**checkpoint.config)
    config._attn_implementation = "eager"
    with (
        # Every weight is loaded below: drawing 100M random numbers first only takes time.
        mock.patch.object(torch.nn.Linear, "reset_parameters"),
        mock.patch.object(torch.nn.Embedding, "reset_parameters"),
        mock.patch.object(model_class, "_init_weights"),
    ):
        model = model_class(config).eval()
    state = {
        name: torch.from_numpy(evaluate(checkpoint.source(name), read).data) for name in checkpoint.tensors
    }
    left = model.load_state_dict(state, strict=False)
    assert left.unexpected_keys == []
    assert left.missing_keys in ([], ["lm_head.weight"])
    return model


def check(path: Path, config_class: Any, model_class: Any, *, chunks: tuple[int, ...]) -> None:
    """Prefill in ``chunks``, then four tokens decoded: logits of the last chunk's end and of each."""
    checkpoint = open_checkpoint(path)
    read = dequantised(checkpoint)
    length = sum(chunks) + 4
    model = create_model(checkpoint.config, max_seq_len=length + 10)
    assert model.ignored_options == ()
    nn.load_weights(model, read, checkpoint.source)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (length,), generator=generator).tolist()
    runner = PagedRunner(model, max_seq_len=length + 10, block_size=16, max_sequences=1)
    done, rows = 0, []
    for size in (*chunks, 1, 1, 1, 1):
        step = [(0, tokens[done : done + size])]
        with torch.no_grad():
            rows.append(model(*runner.arguments(step, rows=[size - 1])))
        done += size
        runner.lengths[0] = done
    oracle = hf_model(checkpoint, read, config_class, model_class)
    with torch.no_grad():
        want = oracle(torch.tensor([tokens]), logits_to_keep=5).logits[0]
    assert relative_error(torch.cat(rows[-5:]), want) < 1e-4


def test_smollm2_equals_transformers(smollm2_gguf: Path) -> None:
    check(smollm2_gguf, hf.LlamaConfig, hf.LlamaForCausalLM, chunks=(9, 4))


@pytest.mark.slow
def test_gemma3_equals_transformers_past_its_window(gemma3_gguf: Path) -> None:
    check(gemma3_gguf, hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, chunks=(500, 40))
