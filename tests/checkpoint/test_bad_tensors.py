"""Tensors that do not fit the architecture or are not numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pelton.errors import CheckpointError
from pelton.ir.block_encoder import quantize
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import assert_finite, check_tensors, open_checkpoint
from tests.checkpoint.makers import tiny_hf_checkpoint, tiny_model
from tests.checkpoint.spoil import NORM, change_tensors


@pytest.fixture(scope="session")
def expected() -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tiny_model("llama").state_dict().items()}


TENSOR_CASES: dict[str, tuple[Callable[[dict], object], str]] = {
    "missing": (
        lambda t: [t.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 2)],
        "2 tensors (model.layers.0.mlp.up_proj.weight, model.layers.2.mlp.up_proj.weight) missing",
    ),
    "many missing": (
        lambda t: [t.pop(name) for name in list(t) if "self_attn" in name],
        "12 tensors (model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight, "
        "model.layers.0.self_attn.v_proj.weight and 9 more) missing",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.0.extra": torch.ones(1)}),
        "1 tensor (model.layers.0.extra) unexpected",
    ),
    "mis-shaped": (
        lambda t: t.update({NORM: torch.ones(65)}),
        f"wrong shape: {NORM} is 65, not 64",
    ),
    "transposed": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}),
        "wrong shape: lm_head.weight is 64 x 288, not 288 x 64",
    ),
    "of a type for no weights": (
        lambda t: t.update({NORM: torch.ones(64, dtype=torch.int64)}),
        f"unsupported type: {NORM} is int64",
    ),
    "float8": (
        lambda t: t.update({NORM: torch.ones(64).to(torch.float8_e4m3fn)}),
        f"unsupported type: {NORM} is float8_e4m3",
    ),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors_that_do_not_fit(case: str, folder: Path, expected: dict, tmp_path: Path) -> None:
    change, message = TENSOR_CASES[case]
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        check_tensors(expected, open_checkpoint(folder))
    assert "model does not match its architecture LlamaForCausalLM" in str(caught.value)


def test_reading_a_type_for_no_weights_is_refused(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({NORM: torch.ones(64, dtype=torch.int64)}))
    message = f"tensor {NORM} of model has type int64, which is no type for weights"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).read(NORM)


def test_harmless_and_ignored_tensors_pass(folder: Path, expected: dict) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.1.mtp": torch.ones(1, dtype=torch.int64),
    }
    change_tensors(folder, lambda t: t.update(extra))
    notes = check_tensors(expected, open_checkpoint(folder), ignore=("*.mtp",))
    assert notes == [
        "ignored 1 tensor (model.layers.0.self_attn.rotary_emb.inv_freq): recomputed, not weights",
        "left out 1 tensor (model.layers.1.mtp): parts of the checkpoint that the model does not use",
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_non_finite_weights_are_named(dtype: str, value: float, tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path, dtype=dtype)
    change_tensors(folder, lambda t: t[NORM].__setitem__(5, value))
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.tensors:
        if name != NORM:
            assert_finite(checkpoint.read(name), name)
    with pytest.raises(CheckpointError, match=f"tensor {NORM} has 1 NaN or infinite values"):
        assert_finite(checkpoint.read(NORM), NORM)


@pytest.mark.parametrize("quant", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_non_finite_block_scales_are_named(quant: str) -> None:
    good = quantize(np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32), quant)
    assert_finite(good, "w")
    data = good.data.copy()
    at = 208 if quant == "q6_k" else 0
    data[2, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match="tensor w has 1 NaN or infinite block scales"):
        assert_finite(HostTensor(quant, good.shape, data), "w")
