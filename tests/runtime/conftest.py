"""Tokenizers of every decoder family: small ones made here, real ones converted from the model files."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pelton.runtime.tokenizer import SpecialTokens, Tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's kind: 256 byte tokens, a few merges, ``<eos>`` special, ``<tool>`` added, not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("Ã", "¤"),
        ("ð", "Ł"),
        ("s", "t"),
    ]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.add_tokens([AddedToken("<tööl>"), AddedToken("a b")])
    eos = backend.token_to_id("<eos>")
    return Tokenizer(backend, SpecialTokens(eos_token="<eos>", eos_token_ids=(eos,)))


def byte_fallback_tokenizer(strip: bool = True) -> Tokenizer:
    """Llama 2's kind (``strip``) or Gemma's: pieces, byte fallback, ``<s>`` special."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "a", "b", "h", "i", "▁a", "▁hi", "hi", "▁▁", "é", "日", "�", "!", "S", "T", "ST"]:
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "a"), ("h", "i"), ("▁", "hi"), ("▁", "▁"), ("S", "T")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<s>", "</s>"])
    special = SpecialTokens(
        bos_token="<s>", eos_token="</s>", bos_token_id=1, eos_token_ids=(2,), add_bos=True
    )
    return Tokenizer(backend, special)


def metaspace_tokenizer() -> Tokenizer:
    """T5's kind of decoder, which the detokenizer has no rules for."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "▁", "a", "b", "▁a", "▁b", "ab", "▁▁", "é"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def word_piece_tokenizer() -> Tokenizer:
    """BERT's kind of decoder: spaces between words, none before ``##`` pieces."""
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "a", "b", "##a", "##b", "hello", "##s"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


SMALL_TOKENIZERS = {
    "byte level": byte_level_tokenizer,
    "byte fallback, strip": byte_fallback_tokenizer,
    "byte fallback": lambda: byte_fallback_tokenizer(strip=False),
    "metaspace": metaspace_tokenizer,
    "word piece": word_piece_tokenizer,
}


def _convert(gguf: Path, directory: Path) -> Tokenizer:
    from pelton.models.checkpoint.gguf import GGUFCheckpoint

    GGUFCheckpoint(gguf).write_tokenizer(directory)
    return Tokenizer.from_dir(directory)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _convert(smollm2_gguf, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _convert(gemma3_gguf, tmp_path_factory.mktemp("gemma3"))
