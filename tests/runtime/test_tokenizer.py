"""The tokenizer directory, special tokens and chat templates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pelton.errors import EngineError, RequestError
from pelton.runtime.chat_template import ChatTemplate
from pelton.runtime.tokenizer import SpecialTokens, Tokenizer
from tests.runtime.conftest import byte_fallback_tokenizer, byte_level_tokenizer

CHATML = (
    "{% for m in messages %}\n"
    "    {% if m.role == 'x' %}{{ raise_exception('no x: ' + m.content) }}{% endif %}\n"
    "<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(tokenizer: Tokenizer, directory: Path, template: str | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    (directory / "special_tokens.json").write_bytes(msgspec.json.encode(tokenizer.special))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def test_a_saved_tokenizer_comes_back(tmp_path: Path) -> None:
    original = byte_level_tokenizer()
    loaded = Tokenizer.from_dir(save(original, tmp_path / "t", CHATML))
    assert loaded.special == original.special
    assert loaded.eos_token_ids == original.eos_token_ids
    assert loaded.vocab_size == original.vocab_size
    ids = loaded.encode("hello wörld<eos>")
    assert ids == original.encode("hello wörld<eos>")
    assert ids[-1] == loaded.eos_token_ids[0]
    assert loaded.decode(ids) == "hello wörld"
    assert loaded.decode(ids, skip_special_tokens=False) == "hello wörld<eos>"
    assert loaded.token_text(ids[-1]) == "<eos>"
    assert loaded.decode([999_999]) == ""


def test_bos_is_added_once_and_only_when_asked() -> None:
    tokenizer = byte_fallback_tokenizer()
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("<s>a").count(1) == 1
    assert 1 not in tokenizer.encode("a", add_special_tokens=False)


def test_half_a_surrogate_pair_is_replaced() -> None:
    assert byte_level_tokenizer().decode(byte_level_tokenizer().encode("a\ud83d")) == "a?"


@pytest.mark.parametrize("damage", ["no tokenizer.json", "no special", "bad special", "bad tokenizer"])
def test_a_damaged_directory_is_named(tmp_path: Path, damage: str) -> None:
    directory = save(byte_level_tokenizer(), tmp_path / "t")
    name = "tokenizer.json" if "tokenizer" in damage else "special_tokens.json"
    if damage.startswith("no"):
        (directory / name).unlink()
    else:
        (directory / name).write_text('{"bos_token": 3', encoding="utf-8")
    with pytest.raises(EngineError, match=f"{name}.*build the engine again"):
        Tokenizer.from_dir(directory).encode("a")


def test_chat_template_renders_like_transformers(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": " hi <b> "}, {"role": "assistant", "content": "yö"}]
    tools = [{"name": "f", "description": "<é> & 'q'"}]
    transformers_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for source in (
        CHATML,
        CHATML + "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
        "{%- for m in messages -%}\n{% generation %}{{ m.content }}{% endgeneration %}\n\n {%- endfor %}",
        "{{ messages | tojson(indent=2) }}\n{{ strftime_now('%Y') }}\n{{ custom }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ):
        tokenizer = Tokenizer.from_dir(save(byte_level_tokenizer(), tmp_path / "t", source))
        for tool_list in (None, tools):
            ours = tokenizer.apply_chat_template(messages, tools=tool_list, variables={"custom": "c"})
            theirs, _ = transformers_utils.render_jinja_template(
                conversations=[messages],
                tools=tool_list,
                chat_template=source,
                add_generation_prompt=True,
                eos_token="<eos>",
                custom="c",
            )
            assert ours == theirs[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (CHATML, "refuses these messages: no x: hi"),
        ("{% if %}", "is broken at line 1"),
        ("{{ messages[0].content.strip(1, 2, 3) }}", "fails on these messages"),
        ("{{ messages[5].role.upper() }}", "fails on these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ 1 // 0 }}", "fails on these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages"),
    ],
)
def test_a_template_that_cannot_render_is_a_request_error(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(source).render([{"role": "x", "content": "hi"}], {"eos_token": "", "tools": None})
    assert caught.value.param == "messages"


def test_no_template_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        byte_level_tokenizer().apply_chat_template([])


def test_smollm2_chat(smollm2_tokenizer: Tokenizer) -> None:
    text = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(smollm2_tokenizer.eos_token_ids[0]) == 2
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_nothing_heavy_is_imported_before_use() -> None:
    code = (
        "import sys, pelton.runtime.executor, pelton.runtime.validation, pelton.runtime.output_processor\n"
        "heavy = {'torch', 'tokenizers', 'jinja2', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_special_tokens_default_to_none() -> None:
    assert SpecialTokens().eos_token_ids == ()
