"""The tokenizer files an engine carries, written alike by every checkpoint reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The content of ``special_tokens.json``."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    """All ids that end a generation."""
    add_bos: bool = False
    """Whether ``tokenizer.json``'s post-processor starts a text with BOS."""


def write_files(
    directory: Path, tokenizer_json: str, special: SpecialTokens, templates: Mapping[str, str]
) -> None:
    """Write the files that ``Checkpoint.write_tokenizer`` promises.

    ``templates``: chat templates by name; ``default`` becomes ``chat_template.jinja``, others go to
    ``additional_chat_templates/NAME.jinja``, as transformers lays them out.
    """
    (directory / "tokenizer.json").write_text(_quick_to_read(tokenizer_json), encoding="utf-8")
    (directory / "special_tokens.json").write_text(
        json.dumps(asdict(special), ensure_ascii=False, indent=1), encoding="utf-8"
    )
    for name, template in templates.items():
        if name == "default":
            target = directory / "chat_template.jinja"
        else:
            target = directory / "additional_chat_templates" / f"{name}.jinja"
            target.parent.mkdir(exist_ok=True)
        target.write_text(template, encoding="utf-8")


def _quick_to_read(tokenizer_json: str) -> str:
    """The same tokenizer with each merge as ``"left right"``, the older of its two forms: ``tokenizers``
    loads it a quarter faster than pairs. Left alone where a token holds a space, which needs pairs."""
    try:
        tokenizer = json.loads(tokenizer_json)
        merges = tokenizer["model"]["merges"]
        joined = [" ".join(merge) for merge in merges if isinstance(merge, list)]
        if len(joined) != len(merges) or any(merge.count(" ") != 1 for merge in joined):
            return tokenizer_json
        tokenizer["model"]["merges"] = joined
        text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (ValueError, KeyError, TypeError):
        return tokenizer_json  # not BPE, or nothing to make sense of here: its reader says what is wrong
    return text
