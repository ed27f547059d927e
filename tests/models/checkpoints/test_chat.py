"""Chat templates and end tokens, in every form in which published folders have them."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from models.checkpoints.decoder import load_decoder
from models.folders.folder import CheckpointError
from tests.decoders import tiny_decoder

WORDS = {f"w{i}": i for i in range(9)} | {"<|im_end|>": 9}


def folder(path: Path, *, tokenizer_config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A decoder whose own config.json has the end token 10; a file is given by its name without .json."""
    tiny_decoder(path)
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    for name, values in {"tokenizer_config": tokenizer_config, **files}.items():
        if values is not None:
            (path / f"{name}.json").write_text(json.dumps(values))
    return path


# End tokens


@pytest.mark.parametrize(
    ("tokenizer_config", "generation_config", "expected"),
    [
        (None, None, (10,)),
        (None, {"eos_token_id": [3, 7]}, (3, 7)),
        (None, {"eos_token_id": 3}, (3,)),
        ({"eos_token": "<|im_end|>"}, None, (9, 10)),
        ({"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, {"eos_token_id": [3, 9, 7]}, (9, 3, 7)),
        ({"eos_token": None}, {"eos_token_id": [3]}, (3,)),
    ],
)
def test_every_end_token_ends_a_text_and_the_tokenizers_comes_first(
    tmp_path: Path, tokenizer_config: dict | None, generation_config: dict | None, expected: tuple[int, ...]
) -> None:
    """The first is what a template calls `eos_token`."""
    loaded = load_decoder(folder(tmp_path, tokenizer_config=tokenizer_config, generation_config=generation_config))
    assert loaded.eos_token_ids == expected


def test_the_token_that_begins_a_text_is_the_tokenizers(tmp_path: Path) -> None:
    generation = {"bos_token_id": 2}
    assert load_decoder(folder(tmp_path / "a", generation_config=generation)).bos_token_id == 2
    config = {"bos_token": "w5"}
    assert load_decoder(folder(tmp_path / "b", generation_config=generation, tokenizer_config=config)).bos_token_id == 5


def test_a_token_that_the_tokenizer_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: eos_token='</s>' is not in tokenizer.json; copy both again"):
        load_decoder(folder(tmp_path, tokenizer_config={"eos_token": "</s>"}))


# Templates


def test_a_template_is_read_from_either_file_and_its_own_file_comes_first(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path, tokenizer_config={"chat_template": "in the settings"})
    assert load_decoder(checkpoint).chat_template == "in the settings"
    (checkpoint / "chat_template.jinja").write_text("in a file")
    assert load_decoder(checkpoint).chat_template == "in a file"


@pytest.mark.parametrize(("tools", "said"), [(None, "plain 1"), ([{}], "with tools 1")])
def test_of_named_templates_the_one_for_tools_is_used_where_there_are_tools(tmp_path: Path, tools: list | None, said: str) -> None:
    named = [
        {"name": "default", "template": "{% set n = 1 %}plain {{ n }}"},
        {"name": "tool_use", "template": "{% macro m(n) %}with tools {{ n }}{% endmacro %}{{ m(1) }}"},
        {"name": "rag", "template": "{{ documents }}"},
    ]
    template = load_decoder(folder(tmp_path, tokenizer_config={"chat_template": named})).chat_template
    assert jinja2.Template(template).render(tools=tools) == said


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "rag", "template": ""}], r"chat_template has \['rag'\], but no 'default'"),
        (7, "chat_template=7 is not accepted"),
        ([{"name": "default", "template": 7}], "chat_template=.* is not accepted"),
    ],
)
def test_a_template_of_another_form_is_refused(tmp_path: Path, template: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_decoder(folder(tmp_path, tokenizer_config={"chat_template": template}))
