"""Which part of a model a process holds: the ranks of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """One rank's place among ``tp_size`` that share every layer. The default is alone.

    Raises ``ConfigError`` when ``rank`` is none of the ranks.
    """

    tp_size: int = 1
    """Ranks among which each layer is split."""
    rank: int = 0
    """This rank, 0 to ``tp_size`` - 1."""

    def __post_init__(self) -> None:
        if self.tp_size < 1 or not 0 <= self.rank < self.tp_size:
            raise ConfigError(
                f"rank {self.rank} of tp_size {self.tp_size} does not exist; ranks go from 0 to tp_size - 1"
            )

    def share(self, size: int) -> range:
        """This rank's part of ``size`` items: all parts are equally long, the last ones may reach
        beyond ``size`` (padding)."""
        each = -(-size // self.tp_size)
        return range(self.rank * each, (self.rank + 1) * each)
