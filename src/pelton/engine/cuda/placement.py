"""Which GPU an engine runs on, and how much of its memory the KV cache may have."""

from __future__ import annotations

from pelton.engine.artifact import Engine
from pelton.engine.config import MemoryPlan
from pelton.engine.config_check import check_gpu_memory_fraction
from pelton.engine.cuda.sampler import sampler_bytes
from pelton.engine.resources import human_bytes
from pelton.errors import ConfigError
from pelton.kernels.gpu.driver import Device

#: Device memory that the driver takes for kernels, graphs and the context's own use, bytes.
_OVERHEAD = 1 << 30


def gpu_device(engine: Engine, index: int) -> Device | None:
    """The GPU for ``engine``; None for a CPU engine. Raises ``EngineError`` where there is none."""
    return Device(index) if engine.on_gpu else None


def usable_memory(device: Device, fraction: float) -> int:
    """Bytes for weights, work memory and KV cache together, of what is free."""
    return max(0, int(device.memory()[0] * fraction) - _OVERHEAD)


def gpu_free(engine: Engine, device: Device, fraction: float) -> int:
    """Bytes for the KV cache besides weights and work memory. Raises ``ConfigError``."""
    check_gpu_memory_fraction(fraction)
    dims = engine.plan.dims
    sampling = sampler_bytes(dims["B"], min(dims["B"], dims["N"]), engine.config.model.vocab_size)
    needed = gpu_work(engine.config.memory) + sampling
    free = device.memory()[0]
    left = usable_memory(device, fraction) - needed
    if left <= 0:
        raise ConfigError(
            f"{engine.config.model.name} needs {human_bytes(needed + _OVERHEAD)} for weights and work; "
            f"{human_bytes(free)} of {human_bytes(device.total_memory)} are free on {device.name}, of which "
            f"{fraction:.0%} may be used"
        )
    return left


def gpu_work(memory: MemoryPlan) -> int:
    """Bytes that a session takes on a GPU besides the KV cache."""
    return memory.weights + memory.arena + memory.workspace
