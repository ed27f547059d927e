"""Shared by completions, chat and responses: from a body to the engine's requests, and from deltas to log-probabilities and usage."""

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

from service.call import Call
from service.catalog import Catalog
from service.dialects.generation_schemas import SamplingFields, StreamOptions
from service.dialects.tei.tokens import aside
from service.errors import EmptyInput, InputTooLong, InvalidRequest, TokenizationFailed
from service.generation.chat.prompt import ChatPrompts
from service.generation.request import Delta, GenerationRequest, Grammar, Sampling
from service.generation.runs import Generator, Runs
from service.runtime.lanes import Lane
from service.settings import Settings

Result = TypeVar("Result")

_INLINE_CHARACTERS = 4_000  # shorter texts are tokenised faster than a switch to another thread takes
_TOKEN_BYTES, _LOGPROB_BYTES = 100, 120  # memory of an unread token, and of each unread log-probability
_ANY_OBJECT = Grammar(kind="json_schema", source='{"type":"object"}')


@lru_cache(maxsize=64)
def system_fingerprint(model: Generator) -> str:
    """A value that changes with any byte of the bundle."""
    return f"fp_{model.manifest.fingerprint[:12]}"


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def now() -> int:
    """Seconds since 1970, for `created`."""
    return int(time.time())


# From the body -------------------------------------------------------------------------------------------------------------------------


def requests(
    body: SamplingFields,
    prompts: Sequence[list[int]],
    model: Generator,
    call: Call,
    *,
    n: int = 1,
    max_tokens: int,
    max_tokens_field: str,
    grammar: Grammar | None,
    prompt_logprobs: int | None = None,
    **options: Any,
) -> list[GenerationRequest]:
    """n requests for each prompt, one after the other. Choice i of a prompt has the same seed whatever else is asked with it.

    Where the body has no seed, each prompt draws one of its own. Log-probabilities of a prompt are computed for its first choice.
    """
    if body.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens={body.min_tokens} is more than {max_tokens_field}={max_tokens}", param="min_tokens")
    vocab_size = model.manifest.limits.vocab_size
    bias = _bias(body.logit_bias, vocab_size)
    check_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids")
    allowed, stop = (
        tuple(dict.fromkeys(body.allowed_token_ids)),
        () if not body.stop else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
    )
    seeds = [secrets.randbits(63) if body.seed is None else body.seed for _ in prompts]
    return [
        GenerationRequest(
            prompt=prompt,
            sampling=Sampling(
                seed=seed_of(seed, index),
                temperature=body.temperature,
                top_k=max(body.top_k, 0),
                top_p=body.top_p,
                min_p=body.min_p,
                typical_p=body.typical_p,
                repetition_penalty=body.repetition_penalty,
                frequency_penalty=body.frequency_penalty,
                presence_penalty=body.presence_penalty,
                logit_bias=bias,
                allowed_token_ids=allowed,
            ),
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
            grammar=grammar,
            prompt_logprobs=None if index else prompt_logprobs,
            lane=Lane.INTERACTIVE if call.lane is None else call.lane,
            deadline=call.deadline,
            client=call.client,
            **options,
        )
        for prompt, seed in zip(map(tuple, prompts), seeds, strict=True)  # one tuple for n choices: the engine checks it once
        for index in range(n)
    ]


def seed_of(seed: int, index: int) -> int:
    """The seed of choice `index`, 63 bits. It does not depend on the number of choices."""
    digest = blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if ids and (worst := max(ids)) >= vocab_size:
        raise TokenizationFailed(f"token id {worst} in {param} is outside this model's vocabulary of {vocab_size}", param=param)


def _bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 11):
            raise InvalidRequest(f"logit_bias has the key {key[:80]!r}, which is no token id", param="logit_bias")
        bias[int(key)] = value
    check_ids(list(bias), vocab_size, "logit_bias")
    return bias


def grammar_of(body: SamplingFields, format_: Grammar | None = None, format_field: str = "", call: Grammar | None = None) -> Grammar | None:
    """The body's only constraint; InvalidRequest if there are two. `format_` is the grammar of a response format, `call` that of a demanded
    tool call, which replaces it: a format is for messages."""
    found = [("tool_choice", call)] if call else [(format_field, format_)] if format_ else []
    if body.guided_json is not None:
        found.append(("guided_json", json_schema(body.guided_json, "guided_json")))
    if body.guided_regex:
        found.append(("guided_regex", Grammar(kind="regex", source=body.guided_regex)))
    if body.guided_grammar:
        found.append(("guided_grammar", Grammar(kind="lark", source=body.guided_grammar)))
    if body.guided_choice:
        found.append(("guided_choice", one_of(body.guided_choice)))
    if (outputs := body.structured_outputs) is not None:
        given: list[tuple[str, Grammar]] = []
        if outputs.json_ is not None:
            given.append(("structured_outputs.json", json_schema(outputs.json_, "structured_outputs.json")))
        if outputs.regex:
            given.append(("structured_outputs.regex", Grammar(kind="regex", source=outputs.regex)))
        if outputs.grammar:
            given.append(("structured_outputs.grammar", Grammar(kind="lark", source=outputs.grammar)))
        if outputs.choice:
            given.append(("structured_outputs.choice", one_of(outputs.choice)))
        if outputs.json_object:
            given.append(("structured_outputs.json_object", _ANY_OBJECT))
        if len(given) > 1:
            raise InvalidRequest(
                "structured_outputs takes only one of json, regex, grammar, choice, json_object", param="structured_outputs"
            )
        found += given
    if len(found) > 1:
        raise InvalidRequest(f"{found[0][0]} and {found[1][0]} cannot be combined: a completion has one constraint", param=found[1][0])
    return replace(found[0][1], param=found[0][0]) if found else None


def one_of(texts: Sequence[str]) -> Grammar:
    return Grammar(kind="regex", source="|".join(map(re.escape, texts)))


def json_schema(schema: str | dict[str, Any], param: str) -> Grammar:
    """The schema as the source of a grammar. Only its size and nesting are checked here; compiling it checks the rest."""
    source = schema if isinstance(schema, str) else json.dumps(schema)
    if len(source) > 65_536:
        raise InvalidRequest(f"{param} has {len(source)} characters and the most is 65536", param=param)
    try:
        parsed = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(f"{param} is not a JSON schema: it must be an object or a boolean", param=param)
    return Grammar(kind="json_schema", source=source)


def format_grammar(type_: str, schema: dict[str, Any] | None, param: str) -> Grammar | None:
    """The constraint of a response format."""
    if type_ == "json_schema":
        if schema is None:
            raise InvalidRequest(f"{param} of type json_schema needs a schema", param=param)
        return json_schema(schema, param)
    if schema is not None:
        raise InvalidRequest(f"{param} of type {type_} takes no schema", param=param)
    return _ANY_OBJECT if type_ == "json_object" else None


def check_streaming(stream: bool, options: StreamOptions | None) -> None:
    if options is not None and options.include_usage and not stream:
        raise InvalidRequest("stream_options.include_usage needs stream=true", param="stream_options")


async def inline_or_aside(catalog: Catalog, n_characters: int, work: Callable[[], Result]) -> Result:
    """Run work that takes time in proportion to the characters: on a tokenizer thread for long texts."""
    return work() if n_characters <= _INLINE_CHARACTERS else await aside(catalog, work, n_characters)


async def encode(
    model: Generator, catalog: Catalog, text: str, param: str, *, add_special_tokens: bool = True, rendered: ChatPrompts | None = None
) -> list[int]:
    """The ids of a prompt, at least one: an empty prompt is the beginning of a text where the model has a token for that.

    A conversation's prompt is read by what has rendered it.
    """
    if len(text) > (limit := catalog.settings.max_input_characters):
        raise InputTooLong(f"`{param}` has {len(text)} characters and the most is {limit}: shorten it", param=param)

    def ids() -> list[int]:
        try:
            return model.encode(text, add_special_tokens=add_special_tokens) if rendered is None else rendered.encode(text)
        except TypeError:  # of `tokenizers`, for text that is not valid Unicode
            raise TokenizationFailed(f"{param} is not valid Unicode: it has half of a surrogate pair", param=param) from None

    encoded = await inline_or_aside(catalog, len(text), ids)
    if encoded:
        return encoded
    decoder = model.manifest.decoder
    if decoder is None or decoder.bos_token_id is None:
        raise EmptyInput(f"`{param}` has no tokens, and this model has none that begins a text: send at least one", param=param)
    return [decoder.bos_token_id]


# From a conversation -------------------------------------------------------------------------------------------------------------------


async def encode_chat(
    model: Generator,
    catalog: Catalog,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    param: str,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The ids of a conversation, up to the beginning of the model's answer. A template that supports `tools` shows them to the model."""
    prompts = model.chat_prompts
    if prompts is None:
        raise InvalidRequest(
            f"model {model.name} has no chat template: use /v1/completions, or export it from a folder with a chat_template.jinja",
            param="model",
        )
    try:
        prompt = await prompts.prompt(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except InvalidRequest as error:
        error.param = param
        raise
    return await encode(model, catalog, prompt, param, rendered=prompts)


def most_tokens(model: Generator, max_tokens: int, prompt_tokens: int) -> int:
    """The most tokens of a completion: `max_tokens`, or fewer if the model has a limited number of positions."""
    n_positions = None if model.manifest.decoder is None else model.manifest.decoder.n_positions
    return max_tokens if n_positions is None else max(0, min(max_tokens, n_positions - prompt_tokens + 1))


# To the answer -------------------------------------------------------------------------------------------------------------------------


def usage_of(runs: Runs) -> dict[str, Any]:
    prompt, completion = runs.prompt_tokens, runs.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": runs.cached_tokens},
    }


def bound_unread(runs: Runs, top_logprobs: int | None, settings: Settings) -> None:
    """Bound the unread tokens of a stream, which wait in memory, by the largest answer."""
    runs.bound_unread(settings.max_answer_bytes / (_TOKEN_BYTES + (0 if top_logprobs is None else 1 + top_logprobs) * _LOGPROB_BYTES))


def worth_sending(delta: Delta) -> bool:
    """Whether a delta has something to send: text, or the end. A token may have no text until the next one."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)


def token_text(token_id: int, model: Generator) -> str:
    """A single token as text; bytes that are not a whole character become U+FFFD."""
    return model.vocabulary[token_id].decode(errors="replace")
