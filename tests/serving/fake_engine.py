"""An engine directory without a model, and the session that plays it: what servers and clients are tested
with. Its tokenizer has one token per byte, and its answers are letters, spaces and full stops."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pelton.engine.artifact import (
    CPU,
    FORMAT_VERSION,
    NATIVE_ABI,
    Engine,
    FileEntry,
    Manifest,
    file_sha256,
)
from pelton.engine.batch import InputBatch
from pelton.engine.config import EngineConfig
from pelton.engine.plan import Buffer, Operand, Plan
from pelton.errors import DeviceError
from tests.runtime.fakes import FakeSession, fake_config

SESSION = "tests.serving.fake_engine:open_fake"

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
VOCAB_SIZE = 260
MAX_SEQ_LEN = 256
MAX_BATCH_SIZE = 8
NUM_BLOCKS = 160

#: Tokens that have an effect when they are in a prompt: the process dies, the step raises, its GPU fails.
CRASH, RAISE, BREAK = (1, 1, 1), (2, 2, 2), (3, 3, 3)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_LETTERS = np.array(sorted(b"abcdefghijklmnopqrstuvwxyz ."), np.int64)


def config() -> EngineConfig:
    """The engine's ``config.json``."""
    made = fake_config(
        vocab_size=VOCAB_SIZE,
        block_size=16,
        max_batch_size=MAX_BATCH_SIZE,
        max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=64,
        eos_token_ids=(EOS, IM_END),
    )
    model = msgspec.structs.replace(made.model, name="fake-model", generation={"temperature": 0.0})
    logits_bytes = 4 * VOCAB_SIZE * 8
    memory = msgspec.structs.replace(made.memory, arena=logits_bytes)
    return msgspec.structs.replace(made, model=model, memory=memory)


def open_fake(
    engine: str | Engine, *, threads: int | None = None, kv_blocks: Sequence[int] | None = None
) -> FakeSession:
    """The session of a fake engine. $FAKE_STEP_SECONDS makes every step that slow."""
    delay = float(os.environ.get("FAKE_STEP_SECONDS", "0"))

    def before_run(batch: InputBatch) -> None:
        if delay:
            time.sleep(delay)
        tokens = batch.input_ids_T.tobytes()
        if np.int32(CRASH).tobytes() in tokens:
            os._exit(7)
        if np.int32(RAISE).tobytes() in tokens:
            raise RuntimeError("the fake session was told to fail")
        if np.int32(BREAK).tobytes() in tokens:
            raise DeviceError("the GPU failed (a test): an illegal address; restart to use it again")

    def edit_logits(batch: InputBatch, logits_NV: np.ndarray[Any, Any]) -> None:
        letters = logits_NV[:, _LETTERS]
        logits_NV -= 20.0
        logits_NV[:, _LETTERS] = letters

    blocks = kv_blocks or (NUM_BLOCKS,)
    stored = msgspec.json.decode(
        (Path(getattr(engine, "path", engine)) / "config.json").read_bytes(), type=EngineConfig
    )
    return FakeSession(stored, blocks, before_run=before_run, edit_logits=edit_logits)


def write_fake_engine(folder: Path, *, chat_template: bool = True) -> Path:
    """Make the engine directory."""
    folder.mkdir(parents=True)
    (folder / "weights").mkdir()
    _write(folder / "config.json", config())
    logits = Buffer(
        name="logits", kind="arena", dtype="float32", shape=("N", VOCAB_SIZE), nbytes=4 * VOCAB_SIZE * 8
    )
    plan = Plan(
        dims={"T": 64, "B": MAX_BATCH_SIZE, "N": 8},
        buffers=(logits,),
        operands=(Operand(name="logits", buffer=0, shape=("N", VOCAB_SIZE), strides=(VOCAB_SIZE, 1)),),
        instructions=(),
        logits=0,
        arena_bytes=logits.nbytes,
        workspace_bytes=0,
    )
    _write(folder / "plan.json", plan)
    (folder / "report.json").write_text('{"checkpoint": "fake", "notes": ["nothing was built"]}')
    write_tokenizer(folder / "tokenizer", chat_template)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        pelton_version="0",
        native_abi=NATIVE_ABI,
        target=CPU,
        files=tuple(
            FileEntry(path=p.relative_to(folder).as_posix(), nbytes=p.stat().st_size, sha256=file_sha256(p))
            for p in files
        ),
    )
    _write(folder / "manifest.json", manifest)
    return folder


def _write(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.encode(value))


def write_tokenizer(folder: Path, chat_template: bool) -> None:
    """A token a byte, and ``SPECIAL``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {byte: chr(byte) for byte in kept}
    chars.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in chars)})
    tokenizer = Tokenizer(models.BPE({chars[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "bos_token_id": BOS, "eos_token_ids": [EOS, IM_END]}
    (folder / "special_tokens.json").write_bytes(msgspec.json.encode(special))
    if chat_template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
