"""EleutherAI's harness itself, on local tasks: our adapter and ``local-completions`` give the same answers.

Skipped without ``lm_eval`` and ``datasets``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("datasets")
pytest.importorskip("tenacity", reason="lm_eval[api]")

from pelton.serving.cli.main import run_command  # noqa: E402
from tests.cli.text_engine import build_text_engine, text_checkpoint  # noqa: E402
from tests.serving.fake_engine import TEMPLATE  # noqa: E402
from tests.serving.running_server import RunningServer  # noqa: E402

DOCS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "Vienna"], "answer": 0},
    {"question": "Two plus three is", "choices": ["four", "six", "five"], "answer": 2},
    {"question": "Water freezes at zero degrees", "choices": ["Newton", "Celsius"], "answer": 1},
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[answer]}}.",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The harness's task manager, without its own tasks and without a hub."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, fields in TASKS.items():
        task = {"task": name, "dataset_path": "json", "test_split": "test", "fewshot_split": "test", **fields}
        task["dataset_kwargs"] = {"data_files": {"test": str(documents)}}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return TaskManager(include_path=str(folder), include_defaults=False)


def answers(tasks: Any, model: Any, names: Sequence[str] = tuple(TASKS), **arguments: Any) -> dict[str, Any]:
    """What the harness got for each document of each task."""
    found = lm_eval.simple_evaluate(
        model, tasks=list(names), task_manager=tasks, bootstrap_iters=0, log_samples=True, **arguments
    )
    assert set(found["results"]) == set(names)
    return {
        name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
        for name, samples in found["samples"].items()
    }


def test_the_adapter_and_the_server_answer_alike(tasks: Any, tmp_path: Path) -> None:
    from pelton.serving.lm_eval import PeltonLM

    engine = build_text_engine(tmp_path / "e", timing=False, max_num_tokens=64)
    adapter = PeltonLM(str(engine))
    ours = answers(tasks, adapter)
    adapter.close()
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((engine / "tokenizer" / "tokenizer.json").read_bytes())
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    with RunningServer(engine) as server:
        url = f"{server.url}/v1/completions"
        arguments = f"base_url={url},model=test-model,tokenizer={tokenizer},max_length=64"
        theirs = answers(tasks, "local-completions", model_args=arguments)
    assert ours["answers"] == theirs["answers"]
    for name in ("choices", "texts"):
        for mine, other in zip(ours[name], theirs[name], strict=True):
            numbers = [
                [entry[0] if isinstance(entry, tuple) else entry for entry in x] for x in (mine, other)
            ]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
            assert all(number < 0 for number in numbers[0])


def test_chats_are_answered_alike(tasks: Any, tmp_path: Path) -> None:
    from pelton.serving.lm_eval import PeltonLM

    checkpoint = text_checkpoint(max_position_embeddings=512)
    engine = build_text_engine(tmp_path / "e", checkpoint, timing=False, max_num_tokens=64)
    (engine / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    adapter = PeltonLM(str(engine))
    arguments = {"names": ["answers"], "apply_chat_template": True, "num_fewshot": 1}
    ours = answers(tasks, adapter, **arguments)
    adapter.close()
    with RunningServer(engine) as server:
        address = f"base_url={server.url}/v1/chat/completions,model=test-model"
        theirs = answers(tasks, "local-chat-completions", model_args=address, **arguments)
    assert ours == theirs and len(ours["answers"]) == len(DOCS)


def test_the_command_scores_tasks_by_name_and_by_file(
    tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: tasks)
    engine = str(build_text_engine(tmp_path / "e", timing=False, max_num_tokens=64))
    names = f"choices,{tmp_path / 'tasks' / 'texts.yaml'},ans*"
    assert run_command(["eval", engine, "--tasks", names, "--limit", "2", "--save", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scores = {(s["task"], s["metric"]): s for s in found["scores"]}
    assert set(scores) == {
        ("choices", "acc"), ("choices", "acc_norm"), ("texts", "word_perplexity"), ("answers", "exact_match")
    }  # fmt: skip
    assert all(s["documents"] == 2 for s in scores.values())
    assert scores["choices", "acc"]["value"] in (0.0, 0.5, 1.0) and "stderr" in scores["choices", "acc"]
    assert (
        scores["texts", "word_perplexity"]["value"] > 100
        and "stderr" not in scores["texts", "word_perplexity"]
    )
    assert run_command(["inspect", engine]) == 0
    assert re.search(r"choices: acc +\d\.\d{4} ± 0\.\d{4} \(0 shots, 2 documents\)", capsys.readouterr().out)


def test_the_command_says_which_task_has_no_data(
    tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: tasks)
    (tmp_path / "documents.jsonl").unlink()
    engine = str(build_text_engine(tmp_path / "e", timing=False))
    assert run_command(["eval", engine, "--tasks", "choices", "-q"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pelton: the harness cannot load task choices: FileNotFoundError: ")
    assert "documents.jsonl" in said and "Traceback" not in said
    assert run_command(["eval", engine, "--tasks", "choicse"]) == 2
    assert "did you mean choices?" in capsys.readouterr().err
