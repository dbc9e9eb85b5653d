"""A real checkpoint, built and run: SmolLM2-135M-Instruct from GGUF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.builder.eager import EagerReference
from pelton.builder.facts import model_recipes
from pelton.builder.probe import Piece, make_batch
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.kernels import native
from pelton.models.checkpoint import open_checkpoint
from pelton.models.registry import create_model

NEW_TOKENS = 24
PROMPT = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def session(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    output = tmp_path_factory.mktemp("smollm2") / "smollm2.engine"
    config = BuildConfig(activations="float32", max_seq_len=256, max_batch_size=2, max_num_tokens=64)
    report = build(smollm2_gguf, config, output=output)
    assert report.quality is not None
    assert report.quality.max_error < 1e-4
    with Session(output, kv_blocks=16) as opened:
        yield opened


def greedy(session: Session, prompt: list[int], count: int) -> list[int]:
    """Generate with nothing but the session."""
    tokens, done = list(prompt), 0
    blocks = np.arange(16, dtype=np.int32)[::-1].copy()
    while len(tokens) < len(prompt) + count:
        new = np.array(tokens[done:], np.int32)
        piece = Piece(tokens=new, start=done, blocks=blocks)
        logits = session.run(make_batch([piece], session.config, logits=[new.size - 1])).logits_NV
        done = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens


def test_greedy_tokens_are_the_eager_models(session: Session, smollm2_gguf: Path) -> None:
    from tokenizers import Tokenizer

    if native.available():
        assert session.runner_name == "native"
    tokenizer = Tokenizer.from_file(str(session.engine.tokenizer_path / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    tokens = greedy(session, prompt, NEW_TOKENS)

    checkpoint = open_checkpoint(smollm2_gguf)
    model = create_model(checkpoint.config, max_seq_len=256)
    reference = EagerReference(
        model, model_recipes(model, checkpoint.source), checkpoint.read, session.config, 16
    )
    ids = np.array(tokens[:-1], np.int32)
    rows = list(range(len(prompt) - 1, len(tokens) - 1))
    piece = Piece(tokens=ids, start=0, blocks=np.arange(16, dtype=np.int32))
    expected = reference.run(make_batch([piece], session.config, logits=rows))
    assert tokens[len(prompt) :] == expected.argmax(-1).tolist()
    assert "scatter" in tokenizer.decode(tokens[len(prompt) :])


def test_the_engine_knows_its_model(session: Session) -> None:
    model = session.config.model
    assert (model.num_layers, model.vocab_size, model.max_position_embeddings) == (30, 49152, 8192)
    assert model.num_parameters == 134_515_008
    assert len(model.eos_token_ids) >= 1
    report: dict[str, Any] = json.loads((session.engine.path / "report.json").read_text())
    assert {"q4_1", "q8_0", "float32"} == set(report["stored"])
    assert report["memory"]["weights"] < 97e6
