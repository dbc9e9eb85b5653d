"""CPU levels: the instruction sets that the native library distinguishes (``csrc/pelton.h``).

A kernel is compiled for some levels; a CPU of one level also runs kernels of the levels it includes.
"""

from __future__ import annotations

from collections.abc import Collection

#: Level -> the levels whose kernels a CPU of this level runs, itself included.
INCLUDES = {
    "generic": ("generic",),
    "avx2": ("generic", "avx2"),
    "avxvnni": ("generic", "avx2", "avxvnni"),
    "avx512": ("generic", "avx2", "avx512"),
    "avx512bf16": ("generic", "avx2", "avx512", "avx512bf16"),
}
#: Every CPU that the library was compiled for: the baseline kernels.
ANY = "any"


def runs(kernel_levels: Collection[str], cpu_level: str) -> bool:
    """Whether a kernel compiled for ``kernel_levels`` runs on every CPU of ``cpu_level`` (or ``any``)."""
    wanted = INCLUDES["generic" if cpu_level == ANY else cpu_level]
    return not set(wanted).isdisjoint(kernel_levels)
