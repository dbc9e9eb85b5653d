"""The tokenizer of a Hugging Face folder: found, completed and written for an engine.

``tokenizer.json`` is taken as it is, and decides whether BOS is added (transformers, since 5, ignores
``add_bos_token`` beside it). Where only a SentencePiece ``tokenizer.model`` exists, its
vocabulary is read and built like a GGUF file's, which holds the same pieces. Other kinds are
converted by ``transformers`` when it is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pelton.errors import CheckpointError, MissingDependencyError
from pelton.models.checkpoint.json_file import read_json
from pelton.models.checkpoint.sentencepiece_model import read_sentencepiece
from pelton.models.checkpoint.tokenizer_files import SpecialTokens, write_files
from pelton.models.checkpoint.tokenizer_from_gguf import GGUFTokenizer

_KINDS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


class HFTokenizer:
    """Checked for existence at once; read when written."""

    def __init__(self, path: Path, config: dict[str, Any], generation_config: dict[str, Any]) -> None:
        self.path = path
        self._model_config = config
        self._generation_config = generation_config
        if not any((path / kind).exists() for kind in _KINDS):
            raise CheckpointError(
                f"{path} has no tokenizer: neither {', '.join(_KINDS[:-1])} nor {_KINDS[-1]}; "
                f"copy it from the model's original folder"
            )
        file = path / "tokenizer_config.json"
        self._config = read_json(file) if file.exists() else {}
        self._special_map = self._optional("special_tokens_map.json")

    def write(self, directory: Path) -> None:
        """Write ``tokenizer.json``, ``special_tokens.json`` and chat templates into ``directory``."""
        tokenizer = self._load()
        bos = self._token("bos_token")
        bos_id = self._bos_id(tokenizer, bos)
        if bos is None and bos_id is not None:
            bos = tokenizer.id_to_token(bos_id)
        add_bos = _adds(tokenizer, bos_id)
        special = SpecialTokens(
            bos_token=bos,
            eos_token=self._token("eos_token"),
            unk_token=self._token("unk_token"),
            pad_token=self._token("pad_token"),
            bos_token_id=bos_id,
            eos_token_ids=self._eos_ids(tokenizer),
            add_bos=add_bos,
        )
        write_files(directory, tokenizer.to_str(), special, self.templates())

    def templates(self) -> dict[str, str]:
        """Chat templates by name; ``default`` is the one a chat uses."""
        found: dict[str, str] = {}
        stated = self._config.get("chat_template")
        if stated is None:
            stated = self._optional("chat_template.json").get("chat_template")
        if isinstance(stated, str):
            found["default"] = stated
        elif isinstance(stated, list):
            for entry in stated:
                if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                    raise CheckpointError(f"{self.path} has a chat_template entry without name and template")
                found[str(entry["name"])] = str(entry["template"])
        elif stated is not None:
            raise CheckpointError(f"{self.path} has a chat_template that is neither text nor a list")
        # Files win over the config, as in transformers.
        if (file := self.path / "chat_template.jinja").exists():
            found["default"] = file.read_text(encoding="utf-8")
        for file in sorted((self.path / "additional_chat_templates").glob("*.jinja")):
            found[file.stem] = file.read_text(encoding="utf-8")
        return found

    # --- reading --------------------------------------------------------------------------------------

    def _load(self) -> Any:
        from tokenizers import Tokenizer

        if (file := self.path / "tokenizer.json").exists():
            try:
                tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
            except Exception as error:  # the tokenizers library raises bare Exceptions
                raise CheckpointError(f"{file} is damaged: {error}") from error
            # Settings of the training run; an engine pads and truncates nothing.
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer
        if (file := self.path / "tokenizer.model").exists() and (
            pieces := read_sentencepiece(file)
        ) is not None:
            return self._from_sentencepiece(file, pieces)
        return self._through_transformers()

    def _from_sentencepiece(self, file: Path, metadata: dict[str, Any]) -> Any:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata["tokenizer.ggml.token_type"]
        scores: list[float] = metadata["tokenizer.ggml.scores"]
        for index, (text, is_special) in sorted(self._added_tokens().items()):
            if index < len(tokens):
                if tokens[index] != text or is_special:
                    tokens[index], types[index] = text, 3 if is_special else 4
            elif index == len(tokens):
                tokens.append(text)
                types.append(3 if is_special else 4)
                scores.append(0.0)
            else:
                raise CheckpointError(
                    f"{self.path} adds token {text!r} with id {index}, beyond the vocabulary"
                )
        for key in ("add_bos_token", "add_eos_token"):
            if isinstance(self._config.get(key), bool):
                metadata[f"tokenizer.ggml.{key}"] = self._config[key]
        arch = str(self._model_config.get("model_type", "llama"))
        return GGUFTokenizer(file, arch, metadata).build()

    def _added_tokens(self) -> dict[int, tuple[str, bool]]:
        """id -> (text, special) of tokens added after the vocabulary was trained."""
        added = {int(index): (text, False) for text, index in self._optional("added_tokens.json").items()}
        for index, entry in (self._config.get("added_tokens_decoder") or {}).items():
            if isinstance(entry, dict) and isinstance(entry.get("content"), str):
                added[int(index)] = (entry["content"], bool(entry.get("special")))
        return added

    def _through_transformers(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingDependencyError(
                f"{self.path} has no tokenizer.json, and its tokenizer needs transformers to be converted: "
                f"pip install transformers"
            ) from error
        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True).backend_tokenizer
        except Exception as error:  # whatever a foreign tokenizer class raises
            raise CheckpointError(
                f"{self.path} has a tokenizer that transformers cannot read: {error}"
            ) from error

    # --- special tokens -------------------------------------------------------------------------------

    def _token(self, key: str) -> str | None:
        for source in (self._config, self._special_map):
            value = source.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                return value
        return None

    def _bos_id(self, tokenizer: Any, bos: str | None) -> int | None:
        if bos is not None and (index := tokenizer.token_to_id(bos)) is not None:
            return int(index)
        for config in (self._generation_config, self._model_config):
            if isinstance(config.get("bos_token_id"), int):
                return int(config["bos_token_id"])
        return None

    def _eos_ids(self, tokenizer: Any) -> tuple[int, ...]:
        ids: dict[int, None] = {}
        for config in (self._generation_config, self._model_config):
            value = config.get("eos_token_id")
            for index in value if isinstance(value, list) else [value]:
                if isinstance(index, int):
                    ids[index] = None
        eos = self._token("eos_token")
        if eos is not None and (index := tokenizer.token_to_id(eos)) is not None:
            ids[int(index)] = None
        return tuple(ids)

    def _optional(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return read_json(file) if file.exists() else {}


def _adds(tokenizer: Any, token_id: int | None) -> bool:
    """Whether encoding a text starts it with ``token_id``."""
    if token_id is None:
        return False
    with_special = tokenizer.encode("a").ids
    return bool(with_special[:1] == [token_id] != tokenizer.encode("a", add_special_tokens=False).ids[:1])
