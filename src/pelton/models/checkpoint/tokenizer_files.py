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
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
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
