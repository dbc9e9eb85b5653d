"""The real model: SmolLM2's GGUF against ``transformers`` with the same dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pelton
from tests.e2e import oracle
from tests.e2e.stepper import Stepper, relative_error

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n",
    "Water boils at",
    "Q: What is 12 times 12?\nA:",
    "The three primary colours are",
    "In 1969, astronauts",
    "To bake bread you need flour,",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "The mitochondria is",
    "Roses are red, violets are",
    "The speed of light in vacuum is about",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name FROM users WHERE",
    "El perro come",
    "A haiku about autumn:\n",
    "The best way to learn a language is",
    "<html>\n<head>\n",
    "Photosynthesis is the process by which",
]
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> Any:
    return oracle.load(smollm2_gguf)


@pytest.fixture(scope="module")
def exact_engine(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = tmp_path_factory.mktemp("smollm2") / "exact.engine"
    config = pelton.BuildConfig(max_batch_size=20, max_seq_len=256, activations="float32", kv_dtype="float32")
    pelton.build(smollm2_gguf, config, output=engine)
    return engine


def test_greedy_text_equals_transformers(model: Any, exact_engine: Path) -> None:
    """64 tokens on 20 prompts; a difference only where the oracle's top two are closer than our error.

    The oracle is run over our own answers: if every token is its choice given the ones before, the two
    greedy texts are equal.
    """
    params = pelton.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with pelton.LLM(exact_engine) as llm:
        outputs = llm.generate(PROMPTS, params)
    near_ties = 0
    with pelton.Session(exact_engine) as session:
        for index, out in enumerate(outputs):
            prompt, answer = list(out.prompt_token_ids), out.outputs[0].token_ids
            assert len(answer) == NEW_TOKENS
            logits = oracle.logits(model, prompt + answer)
            stepper = Stepper(session)
            rows = {0: stepper.step({0: prompt})[0][0]}
            for i in (8, 24, 63):  # our error, measured along the answer
                rows[i] = stepper.step({0: answer[max(rows) : i]})[0][0]
            first = len(prompt) - 1
            error = max(np.abs(row - logits[first + i]).max() for i, row in rows.items())
            assert max(relative_error(row, logits[first + i]) for i, row in rows.items()) < 1e-4
            for i, token in enumerate(answer):
                row = logits[first + i]
                if token != row.argmax():
                    gap = row.max() - row[token]
                    assert gap < 2 * error, f"prompt {index}, token {i}: gap {gap}, error {error}"
                    near_ties += 1
    assert near_ties <= 3
