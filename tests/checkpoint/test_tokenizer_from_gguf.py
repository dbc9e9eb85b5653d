"""Tokenizers rebuilt from GGUF files equal llama.cpp's and transformers' on texts that tell apart.

``llama_cpp_tokens.json`` holds what llama.cpp (the library in the npm package node-llama-cpp 3.22.1)
makes of ``tricky_texts`` with ``add_special=false, parse_special=true``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pelton.models.checkpoint.gguf_file import GGUFFile
from pelton.models.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from pelton.models.checkpoint.tokenizer_from_gguf import GGUFTokenizer
from tests.checkpoint.tricky_texts import texts

#: llama.cpp matches Gemma's run-of-spaces tokens before anything else, longest first; Hugging Face's
#: tokenizer reaches them by merges. Ours is Hugging Face's, which the model was published with.
LLAMA_CPP_DIFFERS = {"gemma3": {" " * 40 + "x", "▁▁a ▁b"}, "smollm2": set()}

#: transformers' GGUF support has no rule for the pre-tokenizer ``smollm``, which cuts every digit off.
TRANSFORMERS_DIFFERS = {
    "gemma3": set(),
    "smollm2": {"x  1  22   333", "١٢٣ ۴۵۶ ४५६ ①② ½ Ⅷ ²", "ﬁ ﬂ Ⅳ ㎏"},
}


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> tuple[str, Path, tokenizers.Tokenizer]:
    path: Path = request.getfixturevalue(f"{request.param}_gguf")
    metadata = GGUFFile(path).metadata
    return request.param, path, GGUFTokenizer(path, metadata["general.architecture"], metadata).build()


def test_the_corpus_is_wide() -> None:
    assert len(set(texts())) == len(texts()) > 200


def test_equal_to_llama_cpp(real: tuple[str, Path, tokenizers.Tokenizer]) -> None:
    name, _, tokenizer = real
    golden = json.loads((Path(__file__).parent / "llama_cpp_tokens.json").read_text())[name]
    assert len(golden) == len(texts())
    differing = {
        text
        for text, ids in zip(texts(), golden, strict=True)
        if tokenizer.encode(text, add_special_tokens=False).ids != ids
    }
    assert differing == LLAMA_CPP_DIFFERS[name]


def test_equal_to_transformers(real: tuple[str, Path, tokenizers.Tokenizer]) -> None:
    name, path, tokenizer = real
    convert: Any = pytest.importorskip("transformers.integrations.gguf")
    architecture, metadata, _ = convert.get_gguf_tokenizer(str(path))
    oracle, _ = convert.convert_gguf_tokenizer(architecture, metadata)
    differing = {
        text
        for text in texts()
        if tokenizer.encode(text, add_special_tokens=False).ids
        != oracle.encode(text, add_special_tokens=False).ids
    }
    assert differing == TRANSFORMERS_DIFFERS[name]


def test_decoding_gives_the_text_back(real: tuple[str, Path, tokenizers.Tokenizer]) -> None:
    name, _, tokenizer = real
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        # SentencePiece spells a space as U+2581, so that character itself does not survive.
        expected = text.replace("▁", " ") if name == "gemma3" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


# --- pre-tokenizers: what each rule cuts ---------------------------------------------------------------

PIECES: dict[str, dict[str, list[str]]] = {
    "gpt-2": {
        "it's IT'S 12345  x": ["it", "'s", " IT", "'", "S", " 12345", " ", " x"],
        "a\n\n b!?": ["a", "\n\n", " b", "!?"],
    },
    "smollm": {"x  12 a": ["x", "  ", "1", "2", " a"]},
    "llama-bpe": {
        "it's IT'S 12345  x": ["it", "'s", " IT", "'S", " ", "123", "45", " ", " x"],
        "a\n\n b!?\n": ["a", "\n\n", " b", "!?\n"],
    },
    "qwen2": {"12345 é'll": ["1", "2", "3", "4", "5", " é", "'ll"]},
    "tekken": {"camelCase HTTPServer 12/": ["camel", "Case", " HTTPServer", " ", "1", "2", "/"]},
    "gpt-4o": {"camelCase it's 1234": ["camel", "Case", " it's", " ", "123", "4"]},
    "falcon": {"a+b 1234567": ["a", "+", "b", " ", "123", "456", "7"]},
    "bloom": {"Hello, world (x)": ["Hello", ",", " world", " (", "x", ")"]},
    "deepseek-coder": {"a 12\n(x": ["a", " ", "1", "2", "\n", "(", "x"]},
    "deepseek-v3": {"ab12345漢字 x!": ["ab", "123", "45", "漢字", " x", "!"]},
}


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, cases in PIECES.items() for t in cases])
def test_pre_tokenizer_pieces(name: str, text: str) -> None:
    splits = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
            for pattern in PRE_TOKENIZERS[name].patterns
        ]
    )
    pieces = [piece for piece, _ in splits.pre_tokenize_str(text)]
    assert "".join(pieces) == text
    assert pieces == PIECES[name][text]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_all_text(name: str) -> None:
    splits = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
            for pattern in PRE_TOKENIZERS[name].patterns
        ]
    )
    for text in texts():
        assert "".join(piece for piece, _ in splits.pre_tokenize_str(text)) == text


# --- small vocabularies ---------------------------------------------------------------------------------


def byte_level(**metadata: Any) -> GGUFTokenizer:
    tokens = ["<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ", "<tool>"]
    return GGUFTokenizer(
        Path("x.gguf"),
        "llama",
        {
            f"tokenizer.ggml.{key}": value
            for key, value in {
                "model": "gpt2",
                "pre": "gpt-2",
                "tokens": tokens,
                "token_type": [3, 3, 1, 1, 1, 1, 1, 1, 4],
                "merges": ["a b"],
                "bos_token_id": 0,
                "eos_token_id": 1,
                **metadata,
            }.items()
        },
    )


def test_merges_decide_unless_the_rule_ignores_them() -> None:
    assert byte_level(pre="gpt-2").build().encode("abc").ids == [5, 4]
    assert byte_level(pre="llama-bpe", add_bos_token=False).build().encode("abc").ids == [6]


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_is_added_when_the_file_or_its_rule_says(pre: str, flag: bool | None, adds: bool) -> None:
    tokenizer = byte_level(pre=pre, **({} if flag is None else {"add_bos_token": flag}))
    assert tokenizer.add_bos is adds
    assert tokenizer.build().encode("a").ids == ([0, 2] if adds else [2])
    assert tokenizer.special_tokens().add_bos is adds


def test_eos_is_added_when_the_file_says() -> None:
    assert byte_level(add_eos_token=True).build().encode("a").ids == [2, 1]


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = byte_level().build()
    ids = tokenizer.encode("a<tool>b</s>").ids
    assert ids == [2, 8, 3, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_named_templates_are_kept() -> None:
    metadata = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    tokenizer = byte_level()
    tokenizer._metadata = {**tokenizer._metadata, **metadata}
    assert tokenizer._templates() == {"default": "D", "tool_use": "T"}
