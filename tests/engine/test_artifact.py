"""Opening engines: whatever is wrong with one is a sentence that says what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pelton.engine.artifact import FORMAT_VERSION, Engine, Manifest, file_sha256, open_engine
from pelton.engine.config import EngineConfig
from pelton.engine.cuda.code import Code
from pelton.engine.plan import Plan
from pelton.engine.session import Session
from pelton.errors import EngineError


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy.engine"
    shutil.copytree(tiny_engine, copy)
    return copy


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file of an engine, and the manifest with it."""
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))
    seal(path)


def seal(path: Path) -> None:
    """Make the manifest agree with ``path``, so that only its content is wrong."""
    root = next(p for p in path.parents if (p / "manifest.json").exists())
    if path.name == "manifest.json":
        return
    manifest = json.loads((root / "manifest.json").read_text())
    for entry in manifest["files"]:
        if root / entry["path"] == path:
            entry["nbytes"], entry["sha256"] = path.stat().st_size, file_sha256(path)
    (root / "manifest.json").write_text(json.dumps(manifest))


def shard(engine: Path) -> Path:
    return next((engine / "weights").iterdir())


def remove(engine: Path) -> None:
    shutil.rmtree(engine)


def become_a_file(engine: Path) -> None:
    shutil.rmtree(engine)
    engine.write_text("GGUF")


def no_manifest(engine: Path) -> None:
    (engine / "manifest.json").unlink()


def broken_manifest(engine: Path) -> None:
    (engine / "manifest.json").write_text('{"format_version": 1, ')


def manifest_of_other_type(engine: Path) -> None:
    edit(engine / "manifest.json", lambda m: {**m, "files": "none"})


def set_manifest(name: str, value: object) -> Callable[[Path], None]:
    return lambda engine: edit(engine / "manifest.json", lambda m: {**m, name: value})


def format_1(engine: Path) -> None:
    shutil.copy(Path(__file__).with_name("manifest_format_1.json"), engine / "manifest.json")


def edited_by_hand(engine: Path) -> None:
    plan = (engine / "plan.json").read_bytes()
    (engine / "plan.json").write_bytes(plan.replace(b"0.00001", b"0.00002"))


def twice(plan: Any) -> None:
    plan["instructions"].append(plan["instructions"][0])


def endless_window(plan: Any) -> None:
    next(i for i in plan["instructions"] if i["op"] == "paged_attention")["attrs"]["window"] = 1 << 62


def endless_tactic(plan: Any) -> None:
    next(i for i in plan["instructions"] if i["tactics"])["tactics"][-1]["max_tokens"] = 1 << 70


def no_weights_json(engine: Path) -> None:
    (engine / "weights.json").unlink()


def outside(engine: Path) -> None:
    edit(engine / "manifest.json", lambda m: m["files"][0].update(path="../../etc/passwd"))


def no_shard(engine: Path) -> None:
    shard(engine).unlink()


def no_tokenizer(engine: Path) -> None:
    (engine / "tokenizer" / "tokenizer.json").unlink()


def short_shard(engine: Path) -> None:
    shard(engine).write_bytes(shard(engine).read_bytes()[:-100])


def broken_config(engine: Path) -> None:
    (engine / "config.json").write_text("not json")
    seal(engine / "config.json")


def config_without_vocabulary(engine: Path) -> None:
    edit(engine / "config.json", lambda c: c["model"].pop("vocab_size") and None)


def unresolved_config(engine: Path) -> None:
    edit(engine / "config.json", lambda c: c["build"].update(block_size=None))


def broken_plan(engine: Path) -> None:
    (engine / "plan.json").write_bytes(b"\xff\xfe\x00")
    seal(engine / "plan.json")


def in_plan(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda engine: edit(engine / "plan.json", lambda plan: change(plan) and None)


def first(plan: Any, kind: str) -> Any:
    return next(b for b in plan["buffers"] if b["kind"] == kind)


def beyond_the_arena(plan: Any) -> None:
    first(plan, "arena")["offset"] = plan["arena_bytes"]


def wide_operand(plan: Any) -> None:
    arena = [i for i, b in enumerate(plan["buffers"]) if b["kind"] == "arena"]
    next(o for o in plan["operands"] if o["buffer"] in arena)["strides"] = [100_000, 1]


def broken_shard(engine: Path) -> None:
    data = bytearray(shard(engine).read_bytes())
    data[8:20] = b"x" * 12
    shard(engine).write_bytes(data)
    seal(shard(engine))


def endless_header(engine: Path) -> None:
    data = shard(engine).read_bytes()
    shard(engine).write_bytes(struct.pack("<Q", 1 << 40) + data[8:])
    seal(shard(engine))


def tiny_shard(engine: Path) -> None:
    shard(engine).write_bytes(b"abc")
    seal(shard(engine))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "there is no engine at .*; build one with: pelton build"),
        (become_a_file, "is a file, not an engine directory; build one with: pelton build"),
        (no_manifest, "is not an engine: it has no manifest.json"),
        (broken_manifest, "is damaged: manifest.json: .*copy the engine again or rebuild it"),
        (manifest_of_other_type, "is damaged: manifest.json: Expected `array`"),
        (set_manifest("format_version", 9), r"engine format 9, newer than this Pelton reads \(6\); upgrade"),
        (
            set_manifest("format_version", 3),
            r"has engine format 3, which this Pelton no longer reads \(6\); rebuild the engine",
        ),
        (format_1, "has engine format 1, which this Pelton no longer reads.*rebuild the engine"),
        (
            set_manifest("target", "tpu"),
            "was built for tpu, and this Pelton runs cpu and NVIDIA GPU engines; rebuild",
        ),
        (set_manifest("native_abi", 99), "native library interface 99 .*; rebuild the engine or install"),
        (set_manifest("needs", ["torch"]), "needs torch, which this Pelton cannot use"),
        (edited_by_hand, r"plan.json does not have the SHA-256 its manifest says \(edited by hand"),
        (no_weights_json, "is incomplete: weights.json is missing"),
        (outside, "names a file outside the engine, '../../etc/passwd'"),
        (no_shard, "is incomplete: weights/model-00001-of-00001.safetensors is missing; copy it again"),
        (no_tokenizer, "is incomplete: tokenizer/tokenizer.json is missing"),
        (short_shard, "is damaged: weights/.* has .* bytes instead of"),
        (broken_config, "is damaged: config.json: "),
        (config_without_vocabulary, "config.json: Object missing required field `vocab_size`"),
        (unresolved_config, r"no value of build\.block_size in config\.json: another Pelton .* rebuild it"),
        (broken_plan, "is damaged: plan.json: "),
        (in_plan(lambda p: p.pop("logits")), "plan.json: Object missing required field `logits`"),
        (in_plan(lambda p: p["dims"].pop("N")), "dimension N has no positive size"),
        (in_plan(beyond_the_arena), "lies outside the arena"),
        (in_plan(wide_operand), "reaches beyond its buffer"),
        (in_plan(lambda p: p["operands"][0].update(buffer=999)), "has no buffer 999"),
        (in_plan(lambda p: p["instructions"][0].update(inputs=[999])), "an operand that does not exist"),
        (in_plan(lambda p: p.update(logits=999)), "the logits are no operand"),
        (in_plan(lambda p: first(p, "weight").update(name="x")), "weight x is in no shard"),
        (
            in_plan(lambda p: first(p, "weight").update(quant="q4_0")),
            "is stored otherwise than the plan says",
        ),
        (in_plan(lambda p: first(p, "k_cache").update(layer=7)), "belongs to no KV group"),
        (in_plan(lambda p: first(p, "arena").update(dtype="float8")), "unknown type float8"),
        (in_plan(twice), "two instructions have one name"),
        (in_plan(endless_window), "has an attribute that is negative or too large"),
        (in_plan(endless_tactic), "the tactics of instruction .* do not cover|Expected `int`"),
        (broken_shard, "is damaged: its header cannot be read; rebuild the engine"),
        (endless_header, "is damaged: its header is longer than the file"),
        (tiny_shard, "is damaged: too short for a weight shard"),
    ],
)
def test_a_bad_engine_is_one_sentence(engine: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(engine)
    with pytest.raises(EngineError, match=message) as caught:
        open_engine(engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "read"),
    [("report.json", lambda e: e.report()), ("weights.json", lambda e: e.weight_sources())],
)
def test_files_that_opening_does_not_read_are_checked_when_read(
    engine: Path, name: str, read: Callable[[Engine], object]
) -> None:
    text = (engine / name).read_bytes()
    (engine / name).write_bytes(text.replace(b"e", b"a", 1))
    opened = open_engine(engine)
    with pytest.raises(EngineError, match=rf"{name} does not have the SHA-256 .*edited by hand"):
        read(opened)
    (engine / name).unlink()
    with pytest.raises(EngineError, match=f"{name} is missing"):
        read(opened)


def test_changed_weights_are_found_when_asked(engine: Path) -> None:
    data = bytearray(shard(engine).read_bytes())
    data[-1] ^= 1
    shard(engine).write_bytes(data)
    open_engine(engine)
    with pytest.raises(EngineError, match="does not have the SHA-256 its manifest says"):
        open_engine(engine, verify=True)


def test_a_good_engine_verifies_and_tells_what_it_is(engine: Path) -> None:
    opened = open_engine(engine, verify=True)
    assert opened.config.model.architecture == "LlamaForCausalLM"
    assert opened.config.model.eos_token_ids == (2, 7, 9)
    assert opened.config.model.bos_token_id == 1
    assert opened.config.model.generation == {"temperature": 0.5, "top_k": 20}
    assert opened.tokenizer_path.joinpath("tokenizer.json").exists()
    assert opened.report()["architecture"] == "LlamaForCausalLM"
    assert opened.nbytes == sum(
        p.stat().st_size for p in engine.rglob("*") if p.is_file() and p.name != "manifest.json"
    )


def test_the_engine_id_follows_the_content(engine: Path, tiny_engine: Path) -> None:
    assert open_engine(engine).engine_id == open_engine(tiny_engine).engine_id
    edit(engine / "report.json", lambda r: {**r, "notes": ["changed"]})
    assert open_engine(engine).engine_id != open_engine(tiny_engine).engine_id


def test_opening_takes_milliseconds(engine: Path) -> None:
    open_engine(engine)
    started = time.process_time()  # a busy neighbour is none of its business
    open_engine(engine)
    assert time.process_time() - started < 0.2


def test_an_engine_moves(engine: Path, tmp_path: Path) -> None:
    moved = engine.rename(tmp_path / "elsewhere")
    with Session(moved, kv_blocks=8, runner="reference") as session:
        assert session.config.model.name == "tiny"


#: SHA-256 of what the files of an engine may hold, by format version.
SCHEMAS = {6: "3fa244279556b7ddbb19b851d69233052e7698bec551718230972e1da726a19a"}


def test_another_content_of_the_files_is_another_format() -> None:
    # An engine with other fields than this Pelton's cannot be read: its users must be told so by the version.
    _, components = msgspec.json.schema_components((EngineConfig, Plan, Manifest, Code))
    names = {
        name: sorted(schema.get("properties", ()))
        for name, schema in components.items()
        if "properties" in schema
    }
    digest = hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()
    assert SCHEMAS.get(FORMAT_VERSION) == digest, (
        f"fields were added to or taken from engine files: raise FORMAT_VERSION and put {digest} beside it"
    )
