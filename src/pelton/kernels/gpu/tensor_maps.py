"""Descriptions of tensors in memory by which a GPU copies tiles of them by itself (sm_90 and later)."""

from __future__ import annotations

import ctypes as C
from typing import Any

from pelton.kernels.gpu.driver import address, call
from pelton.kernels.launch import TensorMap

#: CUtensorMapDataType
_MAP_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_MAP_BYTES, _MAP_ALIGNED = 128, 64
#: How tiles lie in shared memory, which kernels count on: units of 16 bytes exchanged within 128.
SWIZZLE = 3
_L2_128 = 2


def tensor_map(target: int, wanted: TensorMap) -> Any:
    """The CUtensorMap of the tensor at device address ``target``, as a kernel's argument."""
    rank = len(wanted.shape)
    room = C.create_string_buffer(_MAP_BYTES + _MAP_ALIGNED)
    encoded = (C.c_char * _MAP_BYTES).from_buffer(room, -C.addressof(room) % _MAP_ALIGNED)
    call(
        "cuTensorMapEncodeTiled",
        encoded,
        C.c_int(_MAP_TYPES[wanted.dtype]),
        C.c_uint32(rank),
        address(target),
        (C.c_uint64 * rank)(*wanted.shape),
        (C.c_uint64 * (rank - 1))(*wanted.strides),
        (C.c_uint32 * rank)(*wanted.box),
        (C.c_uint32 * rank)(*[1] * rank),
        C.c_int(0),
        C.c_int(SWIZZLE),
        C.c_int(_L2_128),
        C.c_int(0),
    )
    return encoded
