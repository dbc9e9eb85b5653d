"""GPTQ against llm-compressor's, code by code; skipped where that is not installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ir.blocks import dequantize
from pelton.quant.gptq import gptq
from tests.quant.test_algorithms import inputs, seen, weights

gptq_quantize = pytest.importorskip("llmcompressor.modifiers.gptq.gptq_quantize")
quantization = pytest.importorskip("compressed_tensors.quantization")


@pytest.mark.parametrize("size", [32, 128])
def test_codes_with_act_order_are_llm_compressors(size: int) -> None:
    w, statistics = weights(64, 512), seen(inputs(512, tokens=900))
    ours = dequantize(gptq(w, statistics.gram, f"int4_g{size}", act_order=True))
    arguments = quantization.QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=size, actorder="static"
    )
    tops = np.abs(w.reshape(64, -1, size)).max(axis=-1) / np.float32(7.5)
    scales = torch.from_numpy(tops.astype(np.float16).astype(np.float32))[None]
    hessian = torch.from_numpy(2 * statistics.gram / statistics.tokens)[None].clone()
    theirs = gptq_quantize.quantize_weight(
        torch.from_numpy(w.copy())[None], hessian, scales, torch.zeros_like(scales), None, arguments
    )[0][0].numpy()
    assert (np.abs(ours - theirs) < 1e-6).mean() > 0.999
