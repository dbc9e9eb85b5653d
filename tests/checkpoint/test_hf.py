"""Hugging Face folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from pelton.errors import MissingDependencyError
from pelton.ir.blocks import dequantize
from pelton.models.checkpoint import check_tensors, open_checkpoint
from tests.checkpoint.makers import ARCHITECTURES, CHAT_TEMPLATE, tiny_hf_checkpoint, tiny_model

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [(arch, dtype) for arch in ARCHITECTURES for dtype in ("float32", "bfloat16")] + [("llama", "float16")],
)
def test_every_tensor_reads_as_torch_has_it(arch: str, dtype: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    checkpoint = open_checkpoint(tiny_hf_checkpoint(arch, tmp_path, dtype=dtype, model=model))
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    check_tensors({name: tuple(t.shape) for name, t in state.items()}, checkpoint)
    for name, tensor in state.items():
        host = checkpoint.read(name)
        assert host.quant == checkpoint.tensors[name].quant == dtype
        np.testing.assert_array_equal(dequantize(host), tensor.to(getattr(torch, dtype)).float().numpy())
        assert not host.data.flags.owndata, "the mapped file, not a copy"


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = tiny_hf_checkpoint("llama", tmp_path, model=model, max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(folder)
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(checkpoint.read(name).data, tensor.numpy())


def test_gpt2_names_without_prefix_read_as_with(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("gpt2", tmp_path)
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, file)
    checkpoint = open_checkpoint(folder)
    state = tiny_model("gpt2").state_dict()
    state.pop("lm_head.weight")
    notes = check_tensors({name: tuple(t.shape) for name, t in state.items()}, checkpoint)
    assert notes == ["ignored 1 tensor (transformer.h.0.attn.bias): recomputed, not weights"]


def test_a_tied_head_in_the_file_is_reported(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("qwen3", tmp_path)
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    expected = {name: tuple(t.shape) for name, t in tensors.items()}
    tied = ("lm_head.weight", "model.embed_tokens.weight")
    assert check_tensors(expected, open_checkpoint(folder), tied_head=tied) == []
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert check_tensors(expected, open_checkpoint(folder), tied_head=tied) == [
        "lm_head.weight repeats the tied model.embed_tokens.weight: one copy is used"
    ]
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)
    assert check_tensors(expected, open_checkpoint(folder), tied_head=tied) == [
        "lm_head.weight differs from model.embed_tokens.weight, to which the config ties it: "
        "the embedding is used"
    ]


# --- tokenizer ---------------------------------------------------------------------------------------


def written(folder: Path, out: Path) -> tuple[tokenizers.Tokenizer, dict]:
    out.mkdir()
    open_checkpoint(folder).write_tokenizer(out)
    special = json.loads((out / "special_tokens.json").read_text())
    return tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")), special


def edit_json(path: Path, **changes) -> None:
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_the_tokenizer_is_the_folders_own(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    tokenizer, special = written(folder, tmp_path / "out")
    original = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("hello world", "  hello\n\tworld é 漢字 <|im_end|>", ""):
        assert tokenizer.encode(text).ids == original(text)["input_ids"]
    assert special == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "pad_token": None,
        "bos_token_id": 285,
        "eos_token_ids": [287],
        "add_bos": False,
    }
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_tokenizer_json_decides_on_bos_as_in_transformers(
    in_file: bool, wanted: bool | None, tmp_path: Path
) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    if in_file:
        file = folder / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 285)]
        )
        tokenizer.save(str(file))
    edit_json(folder / "tokenizer_config.json", add_bos_token=wanted)
    tokenizer, special = written(folder, tmp_path / "out")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]
    assert tokenizer.encode("hello").ids == oracle
    assert special["add_bos"] == (oracle[0] == 285)


def test_eos_ids_come_from_all_three_places(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    edit_json(folder / "config.json", eos_token_id=[11, 12])
    edit_json(folder / "generation_config.json", eos_token_id=13)
    _, special = written(folder, tmp_path / "out")
    assert special["eos_token_ids"] == [13, 11, 12, 287]


def test_named_templates(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    edit_json(folder / "tokenizer_config.json", chat_template=templates)
    written(folder, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "D"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"


@pytest.mark.parametrize("kind", ["jinja", "json"])
def test_template_files(kind: str, tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    if kind == "jinja":
        (folder / "chat_template.jinja").write_text("FILE")
    else:
        edit_json(folder / "tokenizer_config.json", chat_template=None)
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "FILE"}))
    written(folder, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "FILE"


def test_no_template_writes_none(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    written(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_vocab_and_merges_files_are_converted_by_transformers(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    tokenizer, special = written(folder, tmp_path / "out")
    for text in ("hello world", "  a\n<|im_end|>é"):
        assert tokenizer.encode(text).ids == expected.encode(text).ids
    assert special["eos_token_ids"] == [287]


@pytest.mark.parametrize("token_with_space", [False, True])
def test_merges_are_written_in_the_form_that_loads_faster_where_it_can_hold_them(
    token_with_space: bool, tmp_path: Path
) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    if token_with_space:
        backend = json.loads((folder / "tokenizer.json").read_text())
        known = len(backend["model"]["vocab"]) + len(backend["added_tokens"])
        backend["model"]["vocab"] |= {" e": known, "h e": known + 1}
        backend["model"]["merges"].append(["h", " e"])
        (folder / "tokenizer.json").write_text(json.dumps(backend))
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer, _ = written(folder, tmp_path / "out")
    assert tokenizer.to_str() == expected.to_str()
    merges = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["merges"]
    assert all(isinstance(merge, list if token_with_space else str) for merge in merges)


def test_a_foreign_tokenizer_without_transformers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="needs transformers to be converted: pip install"):
        open_checkpoint(folder).write_tokenizer(tmp_path)


def test_padding_and_truncation_of_training_are_dropped(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(file))
    tokenizer, _ = written(folder, tmp_path / "out")
    assert len(tokenizer.encode("a b c d e f g").ids) == 13


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    first = open_checkpoint(folder).fingerprint()
    assert first == open_checkpoint(folder).fingerprint()
    edit_json(folder / "config.json", rms_norm_eps=1e-4)
    assert open_checkpoint(folder).fingerprint() != first
