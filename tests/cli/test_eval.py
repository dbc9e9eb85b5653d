"""``pelton eval``, its place in the report, and the harness's interface."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pelton.builder.evaluate_engine import evaluate
from pelton.builder.evaluation import eager_config, exact_model, windows
from pelton.builder.gate import QualityGate
from pelton.builder.text import Text, built_in, checkpoint_text, encode, paragraphs
from pelton.engine.artifact import open_engine
from pelton.engine.shapes import OptimizationProfile
from pelton.errors import MissingDependencyError
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.cli.main import run_command
from tests.cli.test_quantize import folder
from tests.cli.text_engine import LIMITS, build_text_engine, text_checkpoint
from tests.serving.fake_engine import TEMPLATE

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture
def engine(source: Path, tmp_path: Path) -> Path:
    return build_text_engine(tmp_path / "small.engine", open_checkpoint(source), quant="int4", timing=False)


def test_built_in_halves_share_no_paragraph() -> None:
    first, second = (set(paragraphs(built_in(half))) for half in (0, 1))
    assert not first & second
    assert 0.5 < len(built_in(0)) / len(built_in(1)) < 2


def test_sequences_begin_as_the_tokenizer_begins_a_text(source: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    base = open_checkpoint(source)
    base.write_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    begin, end = (tokenizer.id_to_token(i) for i in (7, 9))
    tokenizer.post_processor = TemplateProcessing(f"{begin} $A {end}", None, [(begin, 7), (end, 9)])
    tokenizer.save(file)
    text = encode("as time goes by, " * 9, tmp_path, 260, name="text")
    assert text.first.tolist() == [7]
    assert text.ids.tolist() == tokenizer.encode("as time goes by, " * 9, add_special_tokens=False).ids
    batches = windows(text.head(70), eager_config(base, 30), 30)
    assert [batch.input_ids_T.size for batch in batches] == [30, 30, 13]
    assert {int(batch.input_ids_T[0]) for batch in batches} == {7}
    assert np.concatenate([b.input_ids_T[1:] for b in batches]).tolist() == text.ids[:70].tolist()


def test_the_perplexity_is_torchs_of_the_models_own_logits(source: Path, engine: Path) -> None:
    found = evaluate(engine, tokens=120, window=30, against=source)
    base = open_checkpoint(source)
    config = eager_config(base, 30)
    read = checkpoint_text(base, built_in(1), 260, name="text").head(120)
    model, losses = exact_model(base, config, 30), []
    for batch in windows(read, config, 30):
        logits = torch.from_numpy(model.run(batch))[:-1].double()
        losses.append(
            torch.nn.functional.cross_entropy(
                logits, torch.from_numpy(batch.input_ids_T[1:]).long(), reduction="none"
            )
        )
    assert len(losses) == 4
    expected = float(torch.cat(losses).mean().exp())
    assert found.perplexity_against == pytest.approx(expected, rel=1e-5)
    assert found.perplexity != pytest.approx(expected, rel=1e-4)
    assert found.kl_mean is not None and found.kl_max is not None and 0 < found.kl_mean < found.kl_max
    assert (found.tokens, found.window, found.against) == (120, 30, "model")


def test_a_window_is_no_longer_than_a_step(engine: Path) -> None:
    found = evaluate(engine, tokens=100, window=4096)
    assert found.window == LIMITS["max_num_tokens"] and found.kl_mean is None


def test_a_window_is_no_longer_than_a_step_has_rows_of_logits(source: Path, tmp_path: Path) -> None:
    profile = OptimizationProfile.parse("N=1:4:16")
    engine = build_text_engine(
        tmp_path / "narrow.engine", open_checkpoint(source), profiles=(profile,), timing=False
    )
    assert evaluate(engine, tokens=100, window=4096).window == 16


def test_the_command(source: Path, engine: Path, tmp_path: Path, capsys: Capture) -> None:
    prose = tmp_path / "prose.txt"
    prose.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    command = ["eval", str(engine), "--text", str(prose), "--tokens", "90", "-q"]
    assert run_command(command) == 0
    said = capsys.readouterr().out
    assert "90 tokens of prose.txt, in windows of 40" in said and "KL" not in said
    assert run_command([*command, "--against", str(source), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["against"] == "model" and record["kl_mean"] > 0
    assert run_command([*command, "--against", str(engine)]) == 0
    assert "0.00000 nats a token" in capsys.readouterr().out


def test_the_result_is_kept_in_the_report(source: Path, engine: Path, capsys: Capture) -> None:
    before = open_engine(engine)
    error = before.report()["quality"]["max_error"]
    assert run_command(["eval", str(engine), "--tokens", "90", "--against", str(source), "--save", "-q"]) == 0
    after = open_engine(engine, verify=True)
    kept = after.report()["quality"]["evaluation"]
    assert kept["tokens"] == 90 and kept["kl_mean"] > 0
    assert after.report()["quality"]["max_error"] == error
    assert {f.path for f in after.manifest.files} == {f.path for f in before.manifest.files}
    capsys.readouterr()
    assert run_command(["inspect", str(engine)]) == 0
    assert "on text: perplexity" in capsys.readouterr().out
    assert run_command(["run", str(engine), "hello", "--max-tokens", "2"]) == 0, (
        "it is still trusted and whole"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save"], "add --against OTHER"),
        (["--tokens", "1"], "tokens and window must be at least 2, not 1 and 256"),
        (["--quant", "int8"], "is an engine: it is measured as it was built"),
        (["--text", "missing.txt"], "text missing.txt cannot be read"),
    ],
)
def test_what_is_refused(engine: Path, arguments: list[str], message: str, capsys: Capture) -> None:
    assert run_command(["eval", str(engine), "-q", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("block_size", 16), ("max_seq_len", 40)])
def test_engines_of_other_lengths_are_named_with_both(
    name: str, value: int, source: Path, engine: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings: dict[str, Any] = {name: value}
    other = build_text_engine(tmp_path / "other", open_checkpoint(source), timing=False, **settings)
    assert run_command(["eval", str(engine), "--tokens", "90", "--against", str(other), "-q"]) == 2
    own = getattr(open_engine(engine).config.build, name)
    assert f"other has {name} {value}, and model {own}; build one with" in capsys.readouterr().err


def test_a_checkpoint_is_built_and_compared_with_itself(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "cache"))
    command = ["eval", str(source), "--tokens", "80", "--json", "--no-timing", "--max-num-tokens", "40"]
    assert run_command([*command, "--activations", "float32", "--kv-dtype", "float32"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert exact["against"] == "model" and exact["kl_mean"] < 1e-6
    assert run_command([*command, "--quant", "int4"]) == 0
    assert json.loads(capsys.readouterr().out)["kl_mean"] > 1e-3


# ---- lm-evaluation-harness ----


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our adapter over a stand-in for the harness's base class."""

    class LM:
        def __init__(self) -> None:
            self.made = True

    for name, values in (("lm_eval", {}), ("lm_eval.api", {}), ("lm_eval.api.model", {"LM": LM})):
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "pelton.serving.lm_eval", raising=False)
    yield importlib.import_module("pelton.serving.lm_eval")
    sys.modules.pop("pelton.serving.lm_eval", None)


def request(*arguments: Any) -> Any:
    return types.SimpleNamespace(args=arguments)


def log_probabilities(source: Path, text: str) -> Any:
    """Of each byte of ``text`` after the beginning of a sequence (id 1), by the eager model."""
    base = open_checkpoint(source)
    config = eager_config(base, 64)
    ids, first = checkpoint_text(base, text, 260, name="text")
    assert first.tolist() in ([], [1])
    (batch,) = windows(Text(ids, np.array([1], np.int32)), config, 64)
    logits = torch.from_numpy(exact_model(base, config, 64).run(batch)).double()
    return torch.log_softmax(logits, -1)[range(len(ids)), ids.tolist()].numpy()


def test_the_harness_gets_the_models_likelihoods(source: Path, tmp_path: Path, harness: Any) -> None:
    engine = build_text_engine(
        tmp_path / "e", open_checkpoint(source), kv_dtype="float32", timing=False, max_seq_len=64
    )
    lm = harness.PeltonLM(str(engine))
    assert lm.made
    text = "The sky is blue today"
    expected = log_probabilities(source, text)
    ((whole, greedy),) = lm.loglikelihood([request("", text)])
    assert whole == pytest.approx(expected.sum(), rel=1e-4) and not greedy
    (rolling,) = lm.loglikelihood_rolling([request(text)])
    assert rolling == pytest.approx(expected.sum(), rel=1e-4)
    (long,) = lm.loglikelihood_rolling([request(text * 9)])
    assert long < 8 * rolling, "every token counts once, in windows of the engine's length"
    (answer,) = lm.generate_until([request("The sky", {"until": [], "max_gen_toks": 5})])
    ((_, greedy),) = lm.loglikelihood([request("The sky", answer)])
    assert greedy or not answer.isascii()


def test_spaces_that_end_a_context_belong_to_the_continuation(
    source: Path, tmp_path: Path, harness: Any
) -> None:
    engine = build_text_engine(tmp_path / "e", open_checkpoint(source), timing=False)
    lm = harness.PeltonLM(str(engine))
    a, b = lm.loglikelihood([request("The sky is ", "blue"), request("The sky is", " blue")])
    assert a == b


def test_many_questions_are_answered_as_each_alone(
    source: Path, tmp_path: Path, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_AT_ONCE", 3)
    engine = build_text_engine(tmp_path / "e", open_checkpoint(source), kv_dtype="float32", timing=False)
    lm = harness.PeltonLM(str(engine))
    texts = ["The sky", "is blue " * 30, "", "a", "today and " * 9, "no", "more"]
    pairs = [request(text, " and so on") for text in texts]
    for found, pair in zip(lm.loglikelihood(pairs), pairs, strict=True):
        assert found == pytest.approx(lm.loglikelihood([pair])[0], rel=1e-5)
    whole = [request(text) for text in texts]
    assert lm.loglikelihood_rolling(whole) == pytest.approx(
        [lm.loglikelihood_rolling([text])[0] for text in whole], rel=1e-5
    )
    asked = [request(text or "x", {"max_gen_toks": n}) for n, text in enumerate(texts, 1)]
    assert lm.generate_until(asked) == [lm.generate_until([one])[0] for one in asked]
    lm.close()


def test_a_conversation_is_put_as_chat_puts_it(tmp_path: Path, harness: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    engine = build_text_engine(tmp_path / "e", timing=False)
    (engine / "tokenizer" / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    lm = harness.PeltonLM(str(engine))
    tokenizer = lm._llm.tokenizer
    begin = TemplateProcessing("<s> $A", None, [("<s>", tokenizer.bos_token_id)])
    tokenizer.backend.post_processor = begin
    history = [{"role": "user", "content": "Hi"}]
    text = lm.apply_chat_template(history)
    (answer,) = lm.generate_until([request(text, {"max_gen_toks": 5})])
    params = lm._llm.sampling_params(temperature=0.0, max_tokens=5)
    (expected,) = lm._llm.chat(history, params)
    assert answer == expected.outputs[0].text
    assert lm._encode(text) == list(expected.prompt_token_ids), "its beginning once"
    assert lm._encode("Hi")[0] == tokenizer.bos_token_id
    opened = lm.apply_chat_template([*history, {"role": "assistant", "content": "Well"}], False)
    assert opened.endswith("assistant\nWell")


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "pelton.serving.lm_eval", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pelton\[eval\]'"):
        importlib.import_module("pelton.serving.lm_eval")


def test_the_gate_reads_what_is_not_calibrated_on(tmp_path: Path) -> None:
    from pelton.builder.gate import _tokens

    base = text_checkpoint()
    base.write_tokenizer(tmp_path)
    found = _tokens(QualityGate(tokens=50), tmp_path, 260)
    expected = checkpoint_text(base, built_in(1)[:4000], 260, name="text").head(50)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.first, expected.first)
