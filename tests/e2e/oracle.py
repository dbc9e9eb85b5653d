"""``transformers`` with a checkpoint's own (dequantised) values, float32, eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import open_checkpoint


def load(path: Path) -> Any:
    """The model of a checkpoint that Pelton's readers open (GGUF among them)."""
    checkpoint = open_checkpoint(str(path))

    def read(name: str) -> HostTensor:
        values = dequantize(checkpoint.read(name))
        return HostTensor("float32", values.shape, values)

    config = transformers.AutoConfig.for_model(**{"pad_token_id": None, **checkpoint.config})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    state = {
        name: torch.from_numpy(evaluate(checkpoint.source(name), read).data) for name in checkpoint.tensors
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """(len(ids), vocab) float32."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0])
