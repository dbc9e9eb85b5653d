"""docs/adding-a-model.md: the model written there equals ``transformers``, traced and fused too."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from pelton.builder.trace import trace
from pelton.errors import CheckpointError
from pelton.models.registry import ARCHITECTURES, create_model
from pelton.passes import PASSES, PassContext, run_graph_passes
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import check_against_hf, hf_config_dict, load_ours, make_hf, relative_error
from tests.models.paged import PagedRunner

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


def test_the_pages_model_comes_from_an_entry_point_and_equals_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

    class Entry:
        def load(self) -> None:
            exec(compile(code, str(PAGE), "exec"), {"__name__": "my_package.stablelm"})

    real, installed = importlib.metadata.entry_points, True

    def entry_points(**select: str) -> Any:
        if select != {"group": "pelton.models", "name": "StableLmForCausalLM"}:
            return real(**select)
        return [Entry()] if installed else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    stablelm = make_hf(
        hf.StableLmConfig, hf.StableLmForCausalLM, **{**zoo.TINY, "partial_rotary_factor": 0.5}
    )
    installed = False
    with pytest.raises(CheckpointError, match="StableLmForCausalLM is not implemented"):
        create_model(hf_config_dict(stablelm), max_seq_len=64, impl="pelton")
    installed = True
    try:
        check_against_hf(stablelm)
        with pytest.raises(CheckpointError, match="qk_layernorm=True is not implemented for StableLm"):
            create_model(hf_config_dict(stablelm, qk_layernorm=True), max_seq_len=64)
        model = load_ours(stablelm)
        graph = trace(model, max_seq_len=64, block_size=4)
        run_graph_passes(PASSES, graph, PassContext(quant_of=lambda _: "float32"))
        arguments = PagedRunner(model).arguments([(0, [1, 2, 3])], rows=[2])
        with torch.no_grad():
            assert relative_error(graph_forward(graph, model)(*arguments), model(*arguments)) < 1e-6
    finally:
        ARCHITECTURES._entries.pop("StableLmForCausalLM", None)
