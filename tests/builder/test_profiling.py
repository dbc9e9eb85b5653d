"""What an engine keeps for those who look into it is the builder's to choose; what it computes is not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pelton.builder.build import build
from pelton.builder.probe import Piece, make_batch
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.errors import ConfigError
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

SMALL = BuildConfig(block_size=8, max_batch_size=4, max_num_tokens=40)


def test_names_are_kept_as_asked_and_change_no_result(tiny_engine: Path, tmp_path: Path) -> None:
    logits = {}
    for profiling in ("none", "names", "detailed"):
        engine = tmp_path / f"{profiling}.engine"
        config = msgspec.structs.replace(SMALL, profiling=profiling)
        build(RandomCheckpoint(TINY_LLAMA), config, output=engine, check=False)
        plan = open_engine(engine).plan
        text = (engine / "plan.json").read_text()
        assert ("layers.0.mlp" in "".join(i.name for i in plan.instructions)) == (profiling != "none")
        assert ('"detail"' in text) == (profiling == "detailed")
        with Session(engine, kv_blocks=4) as session:
            piece = Piece(tokens=np.arange(9, dtype=np.int32), start=0, blocks=np.array([3, 1], np.int32))
            batch = make_batch([piece], session.config, logits=[8])
            logits[profiling] = session.run(batch).logits_NV.copy()
            name = plan.operands[plan.instructions[0].outputs[0]].name
            if profiling == "none":
                with pytest.raises(
                    ConfigError, match="built with profiling none, so its tensors have no names"
                ):
                    session.run(batch, outputs=[name])
            else:
                assert set(session.run(batch, outputs=[name]).outputs) == {name}
    np.testing.assert_array_equal(logits["none"], logits["names"])
    np.testing.assert_array_equal(logits["none"], logits["detailed"])


def test_details_say_what_an_instruction_does(tmp_path: Path) -> None:
    config = msgspec.structs.replace(SMALL, profiling="detailed")
    build(RandomCheckpoint(TINY_LLAMA), config, output=tmp_path / "e", check=False)
    details = [i.detail for i in open_engine(tmp_path / "e").plan.instructions]
    assert details[0].startswith("embedding(input_ids[T] int32, model.embed_tokens.weight[101,64] float32 ")
    assert all(" -> " in detail for detail in details)
