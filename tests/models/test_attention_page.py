"""docs/extending.md on ``nn.Attention``: it names every argument, and its model with sinks has them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from pelton import nn
from pelton.models.registry import ARCHITECTURES, create_model
from tests.builder.random_checkpoint import RandomCheckpoint
from tests.models.oracle import relative_error
from tests.models.paged import PagedRunner
from tests.models.sink_model import SINKS, eager_logits
from tests.page_package import PAGE

NAME = "SinkLlamaForCausalLM"
SECTION = PAGE.read_text().partition("### Attention\n")[2].partition("\n## ")[0]


def test_every_argument_is_in_the_table_with_its_default() -> None:
    rows = re.findall(r"^\| (`.*) \| .* \|(.*)\|$", SECTION, re.MULTILINE)
    defaults = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    arguments = inspect.signature(nn.Attention).parameters
    assert list(defaults) == list(arguments)
    said = {"": inspect.Parameter.empty, "`head_dim ** -0.5`": None, "`None`": None, "`False`": False}
    for name, argument in arguments.items():
        default = defaults[name].partition(":")[0].strip()
        assert (said[default] if default in said else float(default)) == argument.default, name


def test_the_pages_model_has_sinks() -> None:
    (code,) = re.findall(r"```python\n# my_swish/sinks.py\n(.*?)```", SECTION, re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "my_swish.sinks"})
    full = {"layer_types": ["full_attention"] * 2}
    config: dict[str, Any] = {k: v for k, v in SINKS.items() if k not in ("layer_types", "sliding_window")}
    config["architectures"] = [NAME]
    try:
        checkpoint = RandomCheckpoint(config)
        model = create_model(config, max_seq_len=64)
        nn.load_weights(model, checkpoint.read)

        def read(name: str) -> torch.Tensor:
            return torch.from_numpy(checkpoint.read(name).data)

        ids = list(range(3, 33))
        with torch.no_grad():
            (got,) = PagedRunner(model).step([(0, ids)]).values()
            want = eager_logits(config | full, read, ids)
        assert relative_error(got, want) < 1e-5
        without = eager_logits(config | full, lambda n: read(n) - 100.0 * n.endswith("sinks"), ids)
        assert relative_error(got, without) > 1e-2
    finally:
        ARCHITECTURES._entries.pop(NAME, None)
