"""A checkpoint's own model as one side of a comparison (``engine.debug``): float32, no pass, no packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pelton.builder.eager import EagerReference
from pelton.builder.facts import model_recipes
from pelton.engine.batch import InputBatch
from pelton.engine.config import EngineConfig
from pelton.engine.debug import Array, as_values
from pelton.engine.plan import Plan
from pelton.models.checkpoint import Checkpoint
from pelton.models.registry import create_model


class EagerProbe:
    """Runs the eager model and takes what its innermost modules return.

    A plan names tensors ``MODULE.op``: the last one of a module without submodules is what that module
    returns. Whatever a pass fused away or made anew has no counterpart here.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, plan: Plan, num_blocks: int) -> None:
        self.name = f"{checkpoint.name} (eager model, float32)"
        max_seq_len = config.build.max_seq_len
        assert max_seq_len is not None
        model = create_model(checkpoint.config, max_seq_len=max_seq_len)
        self._taken: dict[str, Array] = {}
        self._logits = plan.operands[plan.logits].name
        made = [plan.operands[o].name for i in plan.instructions for o in i.outputs]
        returned = {name.rpartition(".")[0]: name for name in made}
        for path, module in model.named_modules():
            if path in returned and not any(module.children()):
                module.register_forward_hook(self._taker(returned[path]))
        recipes = model_recipes(model, checkpoint.source)
        self._reference = EagerReference(model, recipes, checkpoint.read, config, num_blocks)
        for cache in (*self._reference.k_caches, *self._reference.v_caches):
            cache.zero_()

    def step(self, batch: InputBatch) -> dict[str, Array]:
        """Compute ``batch``; tensors by the plan's names."""
        self._taken.clear()
        logits = self._reference.run(batch)
        caches = {
            f"{kind}_cache.{layer}": np.array(cache.float().numpy())
            for kind, layers in (("k", self._reference.k_caches), ("v", self._reference.v_caches))
            for layer, cache in enumerate(layers)
        }
        return {**self._taken, self._logits: logits.copy(), **caches}

    def close(self) -> None:
        """Nothing is held."""

    def _taker(self, name: str) -> Any:
        def take(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self._taken[name] = as_values(output.detach().float().numpy())

        return take
