"""The same GGUF file answers the same on the CPU and on the GPU: SmolLM2, greedy, 64 tokens on 20 prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import pelton
from pelton.engine.session import Session
from tests.e2e.stepper import Stepper, relative_error
from tests.e2e.test_smollm2 import NEW_TOKENS, PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
LIMITS = {"max_batch_size": 20, "max_seq_len": 256}
Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds an engine of the file."""
    for module in ("gguf", "tokenizers", "jinja2"):
        pytest.importorskip(module, reason=f"building from GGUF files needs {module}")
    if not smollm2_gguf.exists():
        pytest.skip(f"{smollm2_gguf} is not there (PELTON_SMOLLM2_GGUF)")

    def made(name: str, **settings: object) -> Path:
        path = tmp_path_factory.mktemp("smollm2") / f"{name}.engine"
        config = pelton.BuildConfig(**LIMITS, **settings)  # type: ignore[arg-type]
        pelton.build(smollm2_gguf, config, output=path, check=False)
        return path

    return made


@pytest.fixture(scope="module")
def on_cpu(build: Build) -> Path:
    return build("cpu", dtype="float32", activations="float32", kv_dtype="float32")


@dataclass(frozen=True)
class Agreement:
    """How a GPU's answers and logits compare with the CPU's over the same tokens."""

    equal: int
    """Answers that are the CPU's choice, token by token."""
    differences: list[tuple[int, int, float, float]]
    """Prompt, token, the gap between the CPU's choice and the GPU's, the error of the prompt's logits."""
    relative: float
    """Largest error of the logits over the largest of them."""
    kl: float
    """Mean over all tokens, nats."""

    def __str__(self) -> str:
        ties = ", ".join(
            f"prompt {p} token {t} (gap {g:.2g}, error {e:.2g})" for p, t, g, e in self.differences
        )
        return (
            f"{self.equal} of {len(PROMPTS)} answers equal, logits within {self.relative:.1e}, KL "
            f"{self.kl:.1e}; {len(self.differences)} other choices: {ties or 'none'}"
        )


def agreement(gpu: Path, cpu: Path) -> Agreement:
    """The GPU's own answers, as served, and both sides' logits along them."""
    params = pelton.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with pelton.LLM(gpu) as llm:
        outputs = llm.generate(PROMPTS, params)
    prompts = [list(out.prompt_token_ids) for out in outputs]
    answers = [list(out.outputs[0].token_ids) for out in outputs]
    assert all(len(answer) == NEW_TOKENS for answer in answers)
    differences, errors, relative, kl = [], np.zeros(len(prompts)), 0.0, []
    gaps: dict[tuple[int, int], float] = {}
    with Session(gpu) as a, Session(cpu) as b:
        sides = Stepper(a), Stepper(b)
        new = dict(enumerate(prompts))
        for t in range(NEW_TOKENS):
            got, want = (_rows(side, new, t) for side in sides)
            for p, answer in enumerate(answers):
                errors[p] = max(errors[p], float(np.abs(got[p] - want[p]).max()))
                relative = max(relative, relative_error(got[p], want[p]))
                kl.append(_divergence(want[p], got[p]))
                if answer[t] != want[p].argmax():
                    gaps[p, t] = float(want[p].max() - want[p][answer[t]])
            new = {p: answer[t : t + 1] for p, answer in enumerate(answers)}
    differences = [(p, t, gap, float(errors[p])) for (p, t), gap in gaps.items()]
    equal = len(prompts) - len({p for p, _ in gaps})
    return Agreement(equal, differences, relative, float(np.mean(kl)))


def _rows(side: Stepper, new: dict[int, list[int]], token: int) -> dict[int, np.ndarray]:
    """Logits of each sequence's last token; prompts one by one, as they may exceed a step together."""
    if token:
        return {p: row[0] for p, row in side.step(new).items()}
    return {p: side.step({p: ids})[p][0] for p, ids in new.items()}


def _divergence(want: np.ndarray, got: np.ndarray) -> float:
    """KL of ``got`` from ``want``."""
    p, q = (row.astype(np.float64) - row.max() for row in (want, got))
    log_p, log_q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def test_in_float32_answers_differ_at_near_ties_only(
    build: Build, on_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As against ``transformers``: a token is the CPU's choice, or closer to it than our error."""
    found = agreement(build("gpu32", target="cuda", dtype="float32", kv_dtype="float32"), on_cpu)
    with capsys.disabled():
        print(f"\nSmolLM2, GPU float32 against CPU float32: {found}")
    assert found.relative < 1e-4
    for prompt, token, gap, error in found.differences:
        assert gap < 2 * error, f"prompt {prompt}, token {token}: gap {gap}, error {error}"
    assert len(found.differences) <= 3


def test_in_bfloat16_answers_stay_close(
    build: Build, on_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = agreement(build("gpu16", target="cuda", dtype="bfloat16"), on_cpu)
    with capsys.disabled():
        print(f"\nSmolLM2, GPU bfloat16 against CPU float32: {found}")
    assert found.kl < 5e-3
    for prompt, token, gap, error in found.differences:
        assert gap < 2 * error, f"prompt {prompt}, token {token}: gap {gap}, error {error}"
