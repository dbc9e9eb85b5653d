"""Engines of imported models are engines like any other: gated, refitted, run where torch is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pelton
from pelton.builder.gate import QualityGate
from pelton.builder.refit import refit
from pelton.engine.artifact import open_engine
from pelton.errors import CheckpointError
from tests.e2e import oracle
from tests.e2e.stepper import Stepper, relative_error
from tests.e2e.test_architectures import EXACT, SMALL
from tests.models_import.families import make_model, write_checkpoint


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    """A Cohere 2 model (tied head, two KV groups, reordered projections), its engine and report."""
    folder = tmp_path_factory.mktemp("cohere2")
    model = make_model("cohere2")
    checkpoint = write_checkpoint(model, folder / "checkpoint")
    gate = QualityGate(max_kl=1e-6, tokens=90)
    config = pelton.BuildConfig(**EXACT, **SMALL, timing=False)
    report = pelton.build(checkpoint, config, output=folder / "x.engine", gate=gate)
    return model, folder, report


def logits(engine: Path, ids: list[int]) -> np.ndarray:
    with pelton.Session(engine, threads=1) as session:
        return Stepper(session).step({0: ids}, rows="all")[0]


def test_the_accuracy_gate_reads_the_imported_model(built: tuple[Any, Path, Any]) -> None:
    _, _, report = built
    assert report.quality.evaluation.kl_mean < 1e-6


def test_layers_keep_their_names(built: tuple[Any, Path, Any]) -> None:
    plan = open_engine(built[1] / "x.engine").plan
    names = {b.name for b in plan.buffers} | {i.name for i in plan.instructions}
    assert names >= {
        "model.layers.1.self_attn.linear",
        "model.layers.1.self_attn.q_proj+k_proj+v_proj.weight",
        "model.layers.2.mlp.linear_gated",
        "model.layers.2.mlp.gate_proj+up_proj.weight",
    }


def test_new_weights_without_a_rebuild(built: tuple[Any, Path, Any], tmp_path: Path) -> None:
    model = make_model("cohere2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    checkpoint = write_checkpoint(model, tmp_path / "tuned")
    refit(built[1] / "x.engine", checkpoint, output=tmp_path / "tuned.engine")
    ids = list(range(40))
    assert relative_error(logits(tmp_path / "tuned.engine", ids), oracle.logits(model, ids)) < 1e-4


def test_a_bfloat16_checkpoint_with_the_defaults(tmp_path: Path) -> None:
    model = make_model("granite").to(torch.bfloat16)
    checkpoint = write_checkpoint(model, tmp_path / "granite")
    report = pelton.build(checkpoint, pelton.BuildConfig(timing=False), output=tmp_path / "x.engine")
    assert report.quality is not None
    assert report.quality.bound.startswith("kl_mean")
    assert report.quality.kl_mean < 1e-3


def test_every_tensor_of_the_checkpoint_is_accounted_for(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(make_model("gpt_neox"), tmp_path / "gpt_neox")
    tensors = load_file(checkpoint / "model.safetensors")
    assert "embed_out.weight" in tensors  # what the module calls lm_head

    def build(**changes: Any) -> Any:
        kept = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
        save_file(kept, checkpoint / "model.safetensors", metadata={"format": "pt"})
        return pelton.build(checkpoint, pelton.BuildConfig(timing=False), output=tmp_path / "x.engine")

    mask = torch.ones(1, 1, 128, 128)
    report = build(**{"gpt_neox.layers.0.attention.bias": mask})
    assert any("gpt_neox.layers.0.attention.bias" in note for note in report.notes)
    with pytest.raises(CheckpointError, match=r"gpt_neox\.layers\.0\.novelty.* unexpected"):
        build(**{"gpt_neox.layers.0.novelty": mask})
    with pytest.raises(CheckpointError, match=r"embed_out\.weight.* missing"):
        build(**{"embed_out.weight": None})


def test_it_runs_where_torch_cannot_be_imported(built: tuple[Any, Path, Any]) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import pelton\n"
        f"llm = pelton.LLM({str(built[1] / 'x.engine')!r})\n"
        "out = llm.generate(['hello world'], pelton.SamplingParams(max_tokens=5, ignore_eos=True))\n"
        "print(len(out[0].outputs[0].token_ids))\n"
        "llm.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "5"
