"""Rebuild a Hugging Face tokenizer from a GGUF file's vocabulary.

Two kinds exist. ``gpt2`` files hold a byte-level BPE vocabulary with its merges and the *name* of the
pre-tokenizer. ``llama`` files hold a SentencePiece BPE vocabulary with scores instead of merges: the
merge of two tokens into a third has the third one's score as its priority, which gives back the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pelton.errors import CheckpointError
from pelton.models.checkpoint.pre_tokenizers import find_pre_tokenizer
from pelton.models.checkpoint.tokenizer_files import SpecialTokens, write_files

#: GGUF token types.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6

#: Texts of control tokens that end a turn: chat models stop at them although the file's ``eos`` may
#: be the end of a document.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)

#: Phi-3's control tokens swallow whitespace after them (``rstrip`` in its tokenizer.json), but these.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


class GGUFTokenizer:
    """The tokenizer that a GGUF file's metadata describes; checked at once, built when written."""

    def __init__(self, path: Path, arch: str, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.arch = arch
        self._metadata = metadata
        self.model = self._get("model")
        if self.model is None:
            raise CheckpointError(f"{path} carries no tokenizer (tokenizer.ggml.model)")
        if self.model not in ("gpt2", "llama"):
            raise CheckpointError(
                f"{path} has a tokenizer of kind {self.model!r}, which Pelton does not know "
                f"(known: gpt2, llama)"
            )
        self.tokens: list[str] = self._list("tokens")
        self.types: list[int] = self._get("token_type") or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise CheckpointError(f"{path} has {len(self.tokens)} tokens but {len(self.types)} token types")
        if self.model == "gpt2":
            self._pre = find_pre_tokenizer(self._get("pre") or "default", path)
            self.add_bos = bool(self._get("add_bos_token", self._pre.add_bos))
            self._list("merges")
        else:
            self.add_bos = bool(self._get("add_bos_token", True))
            if len(self._list("scores")) != len(self.tokens):
                raise CheckpointError(
                    f"{path} has {len(self.tokens)} tokens but {len(self._list('scores'))} scores"
                )
        self.bos_id = self._token_id("bos_token_id")
        self.eos_id = self._token_id("eos_token_id")
        if self.add_bos and self.bos_id is None:
            raise CheckpointError(f"{path} asks for BOS before every text but names no BOS token")

    def special_tokens(self) -> SpecialTokens:
        def text(index: int | None) -> str | None:
            return None if index is None else self.tokens[index]

        return SpecialTokens(
            bos_token=text(self.bos_id),
            eos_token=text(self.eos_id),
            unk_token=text(self._token_id("unknown_token_id")),
            pad_token=text(self._token_id("padding_token_id")),
            bos_token_id=self.bos_id,
            eos_token_ids=self.eos_token_ids(),
            add_bos=self.add_bos,
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation: eos, the declared end-of-turn ids, well-known ones."""
        named = [self.eos_id, self._token_id("eot_token_id"), self._token_id("eom_token_id")]
        ids = dict.fromkeys(index for index in named if index is not None)
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (_CONTROL, _USER_DEFINED) and token in _END_OF_TURN:
                ids[index] = None
        return tuple(ids)

    def generation_config(self) -> dict[str, Any]:
        """As a ``generation_config.json`` would say it."""
        config: dict[str, Any] = {"eos_token_id": list(self.eos_token_ids())}
        if self.bos_id is not None:
            config["bos_token_id"] = self.bos_id
        pad = self._token_id("padding_token_id")
        return config if pad is None else config | {"pad_token_id": pad}

    def write(self, directory: Path) -> None:
        """Write ``tokenizer.json``, ``special_tokens.json`` and chat templates into ``directory``."""
        write_files(directory, self.build().to_str(), self.special_tokens(), self._templates())

    def build(self) -> Any:
        """The ``tokenizers.Tokenizer``. Raises ``CheckpointError`` when the vocabulary contradicts itself."""
        try:
            tokenizer = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        except CheckpointError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise CheckpointError(f"{self.path} has a damaged tokenizer: {error}") from error
        self._add_added_tokens(tokenizer)
        self._add_post_processor(tokenizer)
        return tokenizer

    # --- the two kinds ------------------------------------------------------------------------------

    def _byte_level(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        merges = []
        for line in self._list("merges"):
            left, separator, right = line.partition(" ")
            if not separator:
                raise CheckpointError(f"{self.path} has a merge that is not two tokens: {line!r}")
            merges.append((left, right))
        tokenizer = Tokenizer(
            models.BPE(vocab=self._vocab(self.tokens), merges=merges, ignore_merges=self._pre.ignore_merges)
        )
        if self._pre.nfc:
            tokenizer.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self._pre.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=self._prefix(False), use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        tokens = self._respelled()
        vocab = self._vocab(tokens)
        unk = self._token_id("unknown_token_id")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=list(_merges(vocab, self._priorities(tokens))),
                unk_token=None if unk is None else tokens[unk],
                fuse_unk=True,
                byte_fallback=_BYTE in self.types,
            )
        )
        spaces = normalizers.Replace(" ", "▁")
        decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._prefix(True):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            decoder.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(decoder)
        return tokenizer

    def _respelled(self) -> list[str]:
        """Gemma files spell tokens that are runs of spaces with real spaces; the others use ▁."""
        return ["▁" * len(t) if t and not t.strip(" ") else t for t in self.tokens]

    def _priorities(self, tokens: list[str]) -> dict[str, float]:
        """Score of the merge into each token, higher first.

        Gemma's user-defined tokens carry a placeholder score; the order of its vocabulary is the
        order of its merges.
        """
        if self.arch.startswith("gemma"):
            return {token: -index for index, token in enumerate(tokens)}
        return dict(zip(tokens, self._list("scores"), strict=True))

    # --- what both share ------------------------------------------------------------------------------

    def _vocab(self, tokens: list[str]) -> dict[str, int]:
        vocab: dict[str, int] = {}
        for index, token in enumerate(tokens):
            vocab.setdefault(token, index)
        return vocab

    def _add_added_tokens(self, tokenizer: Any) -> None:
        """Control and user-defined tokens are found in text before anything else is done to it."""
        from tokenizers import AddedToken

        tokens = self._respelled() if self.model == "llama" else self.tokens
        control, plain = [], []
        for token, kind in zip(tokens, self.types, strict=True):
            if kind == _CONTROL and token:
                rstrip = self.arch == "phi3" and self.model == "llama" and token not in _PHI3_KEEPS_SPACE
                control.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
            elif kind == _USER_DEFINED and token.strip("▁" if self.model == "llama" else ""):
                # Runs of ▁ exist in normalised text only, where merges find them.
                plain.append(AddedToken(token, special=False, normalized=False))
        tokenizer.add_special_tokens(control)
        tokenizer.add_tokens(plain)

    def _add_post_processor(self, tokenizer: Any) -> None:
        from tokenizers import processors

        before, after, known = "", "", []
        if self.add_bos and self.bos_id is not None:
            known.append((self.tokens[self.bos_id], self.bos_id))
            before = f"{self.tokens[self.bos_id]} "
        if self._get("add_eos_token", False) and self.eos_id is not None:
            known.append((self.tokens[self.eos_id], self.eos_id))
            after = f" {self.tokens[self.eos_id]}"
        if known:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{before}$A{after}", special_tokens=list(dict(known).items())
            )

    def _templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        templates = {}
        for key, value in self._metadata.items():
            if key == prefix:
                templates["default"] = str(value)
            elif key.startswith(prefix + "."):
                templates[key[len(prefix) + 1 :]] = str(value)
        return templates

    # --- metadata ---------------------------------------------------------------------------------------

    def _prefix(self, default: bool) -> bool:
        return bool(self._get("add_space_prefix", default))

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str) -> list[Any]:
        value = self._get(key)
        if not isinstance(value, list) or not value:
            raise CheckpointError(f"{self.path} has a {self.model} tokenizer without tokenizer.ggml.{key}")
        return value

    def _token_id(self, key: str) -> int | None:
        index = self._get(key)
        if index is None or (key == "unknown_token_id" and index >= len(self.tokens)):
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise CheckpointError(
                f"{self.path} has tokenizer.ggml.{key} = {index}, beyond its {len(self.tokens)} tokens"
            )
        return index


def _merges(vocab: Mapping[str, int], priority: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that join into a token, best priority first.

    Pairs that join into the same token keep the order of their ids, as transformers' conversion of
    SentencePiece models has it.
    """
    found = []
    for token in vocab:
        pairs = []
        for cut in range(1, len(token)):
            left = vocab.get(token[:cut])
            if left is not None and (right := vocab.get(token[cut:])) is not None:
                pairs.append((left, right, cut))
        if len(pairs) > 1:
            pairs.sort()
        found += [(priority[token], token, cut) for _, _, cut in pairs]
    found.sort(key=lambda entry: -entry[0])  # stable
    for _, token, cut in found:
        yield token[:cut], token[cut:]
