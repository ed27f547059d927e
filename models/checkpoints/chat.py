"""Reads how a decoder is spoken to: its chat template, and the tokens that begin and end its texts.

The template is in `chat_template.jinja` or, in folders of older releases of transformers, in tokenizer_config.json. A list of templates
there has the name "default" and optionally "tool_use", which is for conversations with tools.
"""

from pathlib import Path
from typing import Any

from models.checkpoints.own import TOKENIZER
from models.folders.folder import MOST_TEMPLATE_BYTES, CheckpointError, JsonSettings, present, read_settings, read_text, read_tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"


def chat_template(folder: Path) -> str | None:
    """Return the source of the folder's chat template, in Jinja, or None if it has none. Raises CheckpointError for a list of templates
    without a default.
    """
    if present(folder / CHAT_TEMPLATE):
        return read_text(folder / CHAT_TEMPLATE, MOST_TEMPLATE_BYTES)
    settings = read_settings(folder / TOKENIZER_CONFIG, required=False)
    found: str | list[dict[str, str]] | None = settings.get("chat_template", None)
    if not isinstance(found, list):
        return found
    named = {each.get("name"): each.get("template") for each in found}
    default, with_tools = named.get("default"), named.get("tool_use")
    if default is None:
        raise CheckpointError(f"{settings.file}: chat_template has {list(named)!s:.80}, but no 'default'; add one, or remove chat_template")
    return default if with_tools is None else f"{{% if tools %}}{with_tools}{{% else %}}{default}{{% endif %}}"


def end_token_ids(settings: JsonSettings, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of all tokens that end a text. The first is the one that a chat template calls `eos_token`, if the tokenizer has one.

    They are `eos_token` of tokenizer_config.json, with which templates end a message, and `eos_token_id` of generation_config.json or, if
    that has none, of config.json (`settings`), which is one id or a list.
    """
    ids = (*_of_tokenizer("eos_token", settings), *_of_settings("eos_token_id", settings))
    return _checked("eos_token_id", tuple(dict.fromkeys(ids)), settings, vocab_size)


def begin_token_id(settings: JsonSettings, vocab_size: int) -> int | None:
    """Return the id of the token that begins a text, or None. The files are those of `end_token_ids`."""
    ids = _of_tokenizer("bos_token", settings) or _of_settings("bos_token_id", settings)
    return next(iter(_checked("bos_token_id", ids, settings, vocab_size)), None)


def _of_tokenizer(key: str, settings: JsonSettings) -> tuple[int, ...]:
    """Return the id of the token under `key` in tokenizer_config.json, where it is a text or an object with `content`."""
    folder = settings.file.parent
    beside = read_settings(folder / TOKENIZER_CONFIG, required=False)
    found = beside.get(key, None)
    token = found.get("content") if isinstance(found, dict) else found
    if token is None:
        return ()
    token_id = read_tokenizer(folder / TOKENIZER).token_to_id(str(token))
    if token_id is None:
        raise CheckpointError(f"{beside.file}: {key}={token!r:.80} is not in {TOKENIZER}; copy both again")
    return (token_id,)


def _of_settings(key: str, settings: JsonSettings) -> tuple[int, ...]:
    generation = read_settings(settings.file.parent / GENERATION_CONFIG, required=False)
    text: dict[str, Any] = settings.get("text_config", {})
    found = generation.get(key, settings.get(key, text.get(key)))
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)


def _checked(key: str, ids: tuple[int, ...], settings: JsonSettings, vocab_size: int) -> tuple[int, ...]:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(f"{settings.file}: {key}={token!r} is not in the vocabulary, 0 to {vocab_size - 1}; correct it")
    return ids
