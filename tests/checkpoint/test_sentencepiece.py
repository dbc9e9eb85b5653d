"""A folder with only ``tokenizer.model`` tokenizes as SentencePiece itself does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from pelton.models.checkpoint import open_checkpoint
from pelton.models.checkpoint.sentencepiece_model import read_sentencepiece
from tests.checkpoint.makers import tiny_hf_checkpoint
from tests.checkpoint.tricky_texts import texts

sentencepiece = pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module", params=[True, False], ids=["prefix space", "no prefix space"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BPE model with byte fallback, as Llama 2's; trained on the corpus itself."""
    folder = tmp_path_factory.mktemp("spm")
    corpus = [line for text in texts() for line in text.replace("\0", "").splitlines() if line] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def converted(model: Path, tmp_path: Path, **config) -> tuple[tokenizers.Tokenizer, dict]:
    folder = tiny_hf_checkpoint("llama", tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    values = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    out = tmp_path / "out"
    out.mkdir()
    open_checkpoint(folder).write_tokenizer(out)
    special = json.loads((out / "special_tokens.json").read_text())
    return tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")), special


def test_equal_to_sentencepiece(trained: Path, tmp_path: Path) -> None:
    tokenizer, special = converted(trained, tmp_path)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    assert special["add_bos"] is True
    for text in texts():
        if any(token in text for token in ("<s>", "</s>", "<unk>", "\0")):
            continue  # SentencePiece never sees special tokens in text, and stops at NUL
        ids = tokenizer.encode(text).ids
        assert ids == [1, *oracle.encode(text)], repr(text)
        assert tokenizer.decode(ids) == text.replace("▁", " "), repr(text)


def test_added_tokens_and_flags_of_the_config(trained: Path, tmp_path: Path) -> None:
    added = {"700": {"content": "<|user|>", "special": True}, "701": {"content": "<think>", "special": False}}
    tokenizer, special = converted(trained, tmp_path, added_tokens_decoder=added, add_bos_token=False)
    assert special["add_bos"] is False
    ids = tokenizer.encode("<|user|><think>").ids
    assert ids == [700, 701]
    assert tokenizer.decode(ids) == "<think>"


def test_other_kinds_of_models_are_left_to_transformers(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "a b c"] * 20),
        model_prefix=str(tmp_path / "m"),
        model_type="unigram",
        vocab_size=100,
        hard_vocab_limit=False,  # how many pieces a small corpus has differs between versions
        minloglevel=2,
    )
    assert read_sentencepiece(tmp_path / "m.model") is None
