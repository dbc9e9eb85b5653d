"""How far results with sums in float16 may be from the reference's, which are in float32.

A tensor core multiplies exactly and adds 16 products at a time to a sum, which it rounds. In a sum of ``m``
such turns the partial sums of 16 j products, j = 1..m, are rounded, by U at most each. Where roundings are
independent (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019) and so are
products, a partial sum's mean square is j / m of the whole's, and the error's is U^2 times the sum of these:
``U sqrt((m + 1) / 2)`` of the norm of the results. Roundings have a mean square of U^2 / 3 and less, which
leaves a factor of nearly two. Errors of several kinds are added.
"""

from __future__ import annotations

import math

#: Half the distance of two float16 numbers, relative.
U = 2.0**-11
#: Products that a tensor core adds to a sum at a time.
TURN = 16
#: Columns of a product, keys of attention, whose sum is in float16; such sums are added up in float32.
COLUMNS = KEYS = 64
#: Of the largest head.
_MAX_DIM = 256
#: Root mean square of scores, counted by the square of their weight in the softmax. Those of the samples
#: are normal: E(s^2 e^2s) / E(e^2s) = 5.
_SCORES = math.sqrt(5.0)


def of_sums(columns: int) -> float:
    """The relative error of sums of so many products."""
    return U * math.sqrt((columns // TURN + 1) / 2)


#: Of a product: its sums, its result's rounding, and that of a weight which was packed.
PRODUCT = of_sums(COLUMNS) + 2 * U
#: Behind a norm x is rounded, too.
NORMED = PRODUCT + U
#: A score's error is its weight's, relative; weights, their sums with values and results are rounded.
ATTENTION = _SCORES * of_sums(_MAX_DIM) + U + of_sums(KEYS) + U
#: The same of queries and keys that are rotated, and rounded again.
ROTATED = ATTENTION + _SCORES * 2 * U


def gated(product: float) -> float:
    """Of act(gate) * up, both of which are off by ``product``."""
    return 2 * product + U
