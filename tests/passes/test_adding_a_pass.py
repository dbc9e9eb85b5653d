"""docs/adding-a-pass.md: the pass written there does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from pelton import nn
from pelton.builder.trace import trace
from pelton.nn import functional as F
from pelton.passes import PassContext, run_graph_passes
from tests.ir.graph_forward import graph_forward
from tests.models.paged import int32

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-pass.md").read_text()


class Scaled(nn.CausalLM):
    """Embeddings times 2 times 3; with ``reuse``, the first product is read twice."""

    vocab_size, hidden_size, num_layers, max_position_embeddings = 8, 8, 0, 64

    def __init__(self, reuse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        torch.nn.init.normal_(self.embed.weight)
        self.reuse = reuse

    def layer_kv(self) -> list[nn.LayerKV]:
        return []

    def forward(self, ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> Any:
        x_TD = self.embed(ids) * 2.0
        y_TD = x_TD * 3.0
        return F.take_rows(y_TD + x_TD if self.reuse else y_TD, rows)


def test_the_pages_pass_folds_reports_and_explains() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    page: dict[str, Any] = {}
    exec(compile(code, "adding-a-pass.md", "exec"), page)
    context = PassContext(quant_of=lambda _: "float32")
    for reuse in (False, True):
        model = Scaled(reuse)
        graph, texts = trace(model, max_seq_len=64), []
        (report,) = run_graph_passes((page["PASS"],), graph, context, explain=texts.append)
        arguments = (int32([3, 1, 2]), int32([0, 1, 2]), [], [], [], int32([2]))
        torch.testing.assert_close(graph_forward(graph, model)(*arguments), model(*arguments))
        if reuse:
            assert (report.matched, report.changed) == (1, 0)
            assert report.skipped == (("mul_1", "mul is read elsewhere too"),)
        else:
            assert (report.matched, report.changed, report.skipped) == (1, 1, ())
            assert texts == [shown.rstrip("\n")]
