"""Engines for GPUs whose kernels are names only: for what happens around kernels, on a null GPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from pelton.builder import cubins
from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from pelton.kernels.launch import Source
from pelton.models.checkpoint import Checkpoint
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

CONFIG = TINY_LLAMA | {"vocab_size": 300, "max_position_embeddings": 128, "eos_token_id": [257]}


class WithTokenizer(RandomCheckpoint):
    """A checkpoint whose engine can be served: a token a byte."""

    def write_tokenizer(self, directory: Path) -> None:
        from tests.serving.fake_engine import write_tokenizer

        write_tokenizer(directory, chat_template=False)


def paper_cubin(source: Source, sm: int) -> cubins.Cubin:
    return cubins.Cubin(image=b"paper", name=source.function, threads=128, shared=0, scratch=2)


def build_paper_engine(
    path: Path, checkpoint: Checkpoint | None = None, *, check: bool = False, **settings: object
) -> Path:
    """A tiny engine for ``sm_90``; nothing is compiled, and nothing checked unless ``check``."""
    config = {"target": "sm_90", "max_batch_size": 4, "max_num_tokens": 128, **settings}
    with (
        mock.patch("pelton.builder.build.check_compilers"),
        mock.patch.object(cubins, "compile_kernel", paper_cubin),
        mock.patch.object(cubins, "cores", return_value=1),
    ):
        build(
            checkpoint or WithTokenizer(CONFIG, quant="bfloat16"),
            BuildConfig(**config),  # type: ignore[arg-type]
            output=path,
            check=check,
        )
    return path
