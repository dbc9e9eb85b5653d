"""llama.cpp's names of byte-level pre-tokenizers: how text is cut before merges apply.

A GGUF file states the name, not the rule. Each rule is a list of regular expressions applied in
turn, every match and every gap between matches becoming a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pelton.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How one family of byte-level vocabularies cuts text."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token is taken whole, whatever its merges say (Llama 3, Tekken)."""
    add_bos: bool = False
    """Whether BOS starts a text when the file does not say."""
    nfc: bool = False
    """Text is normalised to Unicode NFC first (Qwen)."""


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_AND_REST = (
    _CONTRACTIONS
    + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _WORD_AND_REST.format(digits=r"\p{N}{1,3}")
_QWEN2_SPLIT = _WORD_AND_REST.format(digits=r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{{L}}\p{{N}}]?{u}*{l}+{c}|[^\r\n\p{{L}}\p{{N}}]?{u}+{l}*{c}"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = PreTokenizer(patterns=(_GPT2_SPLIT,))
_DIGITS = PreTokenizer(patterns=(r"\p{N}", _GPT2_SPLIT))
_LLAMA3 = PreTokenizer(patterns=(_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer(patterns=(_LLAMA3_SPLIT,))
_QWEN2 = PreTokenizer(patterns=(_QWEN2_SPLIT,), nfc=True)
_DIGIT_WORDS = PreTokenizer(patterns=(_QWEN2_SPLIT,))
_TEKKEN = PreTokenizer(
    patterns=(_CASED.format(u=_UPPER, l=_LOWER, c="") + r"|\p{N}" + _CASED_REST,),
    ignore_merges=True,
    add_bos=True,
)
_O200K = PreTokenizer(
    patterns=(_CASED.format(u=_UPPER, l=_LOWER, c=_CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_REST,)
)
_FALCON = PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_SPLIT, "[0-9][0-9][0-9]"))
_BLOOM = PreTokenizer(patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+",))
_DEEPSEEK_CODER = PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_DEEPSEEK_V3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    )
)

PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "jina-es": _GPT2,
    "jina-de": _GPT2,
    "roberta-bpe": _GPT2,
    "gigachat": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _DIGIT_WORDS,
    "stablelm2": _DIGIT_WORDS,
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "falcon": _FALCON,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "bloom": _BLOOM,
    "poro-chat": _BLOOM,
}


def find_pre_tokenizer(name: str, path: object) -> PreTokenizer:
    """The rule called ``name``; raises ``CheckpointError`` naming the file and the known names."""
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path} uses the pre-tokenizer {name!r}, which Pelton does not know "
            f"(known: {', '.join(sorted(PRE_TOKENIZERS))}); use the model's Hugging Face folder instead"
        )
    return PRE_TOKENIZERS[name]
