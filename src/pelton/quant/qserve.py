"""Progressive group quantisation (Lin et al. 2024, "QServe: W4A8KV4 Quantization and System Co-design").

A row is first int8 with one scale s0, then each group of those integers is 4-bit with an integer scale s1 and
zero point: w = s0 s1 (q - z). A W4A8 kernel multiplies in int8 and scales a row once. Level one only uses
[-119, 119], so that s1 (q - z) always fits in int8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pelton.ir.group_blocks import Float32, from_codes
from pelton.ir.group_encoder import into_groups
from pelton.ir.tensors import HostTensor

#: The protective range of level one.
PROTECTED = 119

Integers = npt.NDArray[np.int32]


def progressive(weight: Float32, quant: str) -> tuple[Float32, Integers, Integers, Integers]:
    """``weight`` (rows, K) -> s0 (rows, 1), and s1, z, q of the groups: (rows, groups, 1) twice and (rows,
    groups, g); the value is s0 s1 (q - z)."""
    s0 = np.maximum(np.abs(weight).max(axis=1, keepdims=True) / np.float32(PROTECTED), np.float32(1e-20))
    level1 = np.rint(into_groups((weight / s0).astype(np.float32), quant)).astype(np.int32)
    low = np.minimum(level1.min(axis=-1, keepdims=True), 0)
    high = np.maximum(level1.max(axis=-1, keepdims=True), 0)
    s1 = np.maximum(np.rint((high - low) / 15), 1).astype(np.int32)
    z = np.clip(np.rint(-low / s1), 0, 15).astype(np.int32)
    q = np.clip(np.rint(level1 / s1) + z, 0, 15).astype(np.int32)
    return s0, s1, z, q


def progressive_tensor(weight: Float32, quant: str) -> HostTensor:
    """The same as int4 groups: d = s0 s1 in float16."""
    s0, s1, z, q = progressive(weight, quant)
    codes = q.astype(np.uint8).reshape(weight.shape)
    return from_codes(quant, codes, s0 * s1[..., 0], z[..., 0].astype(np.uint8))
