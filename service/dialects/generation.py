"""Converts request bodies to requests to the generation engine, for completions, chat, responses and text-generation-inference."""

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

from service.call import Call
from service.catalog import Catalog
from service.dialects.generation_schemas import SamplingFields, StreamOptions
from service.errors import EmptyInput, InputTooLong, InvalidRequest, TokenizationFailed
from service.generation.chat.prompt import ChatPrompts
from service.generation.model import Generator
from service.generation.request import GenerationRequest, Grammar, Sampling
from service.generation.runs import Runs
from service.runtime.lanes import Lane
from service.settings import Settings

Result = TypeVar("Result")

_INLINE_CHARACTERS = 4_000  # tokenising a shorter text takes less time than switching to another thread
_TOKEN_CHARACTERS = 4  # characters of a token, estimated before a text is tokenised; of a word in English
_TOKEN_BYTES, _LOGPROB_BYTES = 100, 120  # estimated memory in bytes of a token that is not yet sent, and of each of its log-probabilities
_SAMPLING = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_ANY_OBJECT = Grammar(kind="json_schema", source='{"type":"object"}')


@lru_cache(maxsize=64)
def system_fingerprint(model: Generator) -> str:
    """Return OpenAI's `system_fingerprint`, which changes if any byte of the bundle changes."""
    return f"fp_{model.manifest.fingerprint[:12]}"


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def derived_id(prefix: str, of: str) -> str:
    """Return an id of 128 bits that is derived from `of` by a hash, so that equal `of` give equal ids."""
    return f"{prefix}{blake2b(of.encode(), digest_size=16).hexdigest()}"


def now() -> int:
    """Return the current Unix time in seconds, for the field `created`."""
    return int(time.time())


# From a body to engine requests ------------------------------------------------------------------------------------------------


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
    drawn: Sequence[int] | None = None,
    **options: Any,
) -> list[GenerationRequest]:
    """Return n engine requests for each prompt: the n choices of the first prompt, then those of the second, and so on.

    The seed of a choice depends only on its index and on its prompt's seed. `drawn` has one seed for each prompt; if it is None, the
    function `seeds` draws them. A prompt's log-probabilities are computed for its first choice only. `max_tokens_field`: the body's name
    for `max_tokens`, for errors. `options`: further fields of GenerationRequest.
    """
    if body.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens={body.min_tokens} is more than {max_tokens_field}={max_tokens}", param="min_tokens")
    vocab_size = model.manifest.limits.vocab_size
    sampling = Sampling(
        seed=0,
        top_k=max(body.top_k, 0),
        logit_bias=_bias(body.logit_bias, vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids)),
        **{name: getattr(body, name) for name in _SAMPLING},
    )
    check_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return [
        GenerationRequest(
            prompt=prompt,
            sampling=replace(sampling, seed=seed_of(seed, index)),
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=tuple(filter(None, stop)),
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
            grammar=grammar,
            prompt_logprobs=None if index else prompt_logprobs,
            lane=Lane.INTERACTIVE if call.lane is None else call.lane,
            deadline=call.deadline,
            client=call.client,
            tenant=call.tenant_name,
            cache_salt=body.cache_salt,
            **options,
        )
        # The n choices of a prompt share one tuple of ids, which the engine checks once.
        for prompt, seed in zip(map(tuple, prompts), drawn or seeds(body.seed, len(prompts)), strict=True)
        for index in range(n)
    ]


def seeds(seed: int | None, prompts: int) -> tuple[int, ...]:
    """Return a seed for each prompt: the request's seed for all of them, or a random seed for each."""
    return tuple(secrets.randbits(63) if seed is None else seed for _ in range(prompts))


def seed_of(seed: int, index: int) -> int:
    """Return the 63-bit seed of choice `index`. It does not depend on the number of choices."""
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
    """Return the grammar that constrains the text, or None. Raises InvalidRequest if the body has two grammars.

    `format_`: the grammar of the body's response format, which is in the field `format_field`. `call`: the grammar of a required tool
    call; it replaces `format_`."""
    found = [replace(call, param="tool_choice")] if call else [replace(format_, param=format_field)] if format_ else []
    found += _constraints(body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice, "guided_{}")
    if (outputs := body.structured_outputs) is not None:
        given = _constraints(outputs.json_, outputs.regex, outputs.grammar, outputs.choice, "structured_outputs.{}")
        given += [replace(_ANY_OBJECT, param="structured_outputs.json_object")] if outputs.json_object else []
        if len(given) > 1:
            raise InvalidRequest(
                "structured_outputs takes only one of json, regex, grammar, choice, json_object", param="structured_outputs"
            )
        found += given
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(f"{first} and {second} cannot be combined: a completion has one constraint", param=second)
    return found[0] if found else None


def _constraints(
    schema: str | dict[str, Any] | None, regex: str | None, grammar: str | None, choice: Sequence[str] | None, field: str
) -> list[Grammar]:
    """Return a grammar for each given constraint. `field` is the pattern of the fields' names, such as "guided_{}", for errors."""
    found = [] if schema is None else [json_schema(schema, field.format("json"))]
    found += [Grammar(kind="regex", source=regex, param=field.format("regex"))] if regex else []
    found += [Grammar(kind="lark", source=grammar, param=field.format("grammar"))] if grammar else []
    found += [Grammar(kind="regex", source="|".join(map(re.escape, choice)), param=field.format("choice"))] if choice else []
    return found


def json_schema(schema: str | dict[str, Any], param: str) -> Grammar:
    """Return the grammar of a JSON schema. Only its size, nesting and JSON syntax are checked here; compiling it checks the rest."""
    source = schema if isinstance(schema, str) else json.dumps(schema)
    if len(source) > 65_536:
        raise InvalidRequest(f"{param} has {len(source)} characters and the most is 65536", param=param)
    try:
        parsed = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(f"{param} is not a JSON schema: it must be an object or a boolean", param=param)
    return Grammar(kind="json_schema", source=source, param=param)


def value_grammar(type_: str, value: str | dict[str, Any], param: str) -> Grammar:
    """Return the grammar in text-generation-inference's form: a type, and a JSON schema or regular expression as its value."""
    if type_ == "regex":
        if not isinstance(value, str):
            raise InvalidRequest(f"{param}.value of a regex must be a string", param=param)
        return Grammar(kind="regex", source=value, param=param)
    if type_ == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
        value = value["schema"]  # the value is an object with a name and the schema
    return json_schema(value, param)


def format_grammar(type_: str, schema: dict[str, Any] | None, param: str) -> Grammar | None:
    """Return the grammar of a response format, or None if the format is plain text."""
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


async def inline_or_aside(catalog: Catalog, call: Call, n_characters: int, work: Callable[[], Result]) -> Result:
    """Run `work`, whose time is proportional to `n_characters`, and return its result. For a long text, a tokenizer thread runs
    `work`, so that it does not block the event loop."""
    return work() if n_characters <= _INLINE_CHARACTERS else await catalog.tokenizers.run(work, size=n_characters, client=call.client)


async def encode(
    model: Generator,
    catalog: Catalog,
    call: Call,
    text: str,
    param: str,
    *,
    add_special_tokens: bool = True,
    rendered: ChatPrompts | None = None,
    generates: bool = True,
) -> list[int]:
    """Return the token ids of a prompt. For an empty prompt, return the token that begins a text. Raises EmptyInput if the
    model has no such token.

    `rendered`: the model's chat prompts, if they rendered `text` from a conversation. They then tokenise the text instead of the model.
    `generates`: the engine will be asked to continue the prompt. Raises QueueTooLong, before the text is tokenised, if the engine cannot
    begin it in time.
    """
    if len(text) > (limit := catalog.settings.max_input_characters):
        raise InputTooLong(f"`{param}` has {len(text)} characters and the maximum context length is {limit}: shorten it", param=param)

    def ids() -> list[int]:
        try:
            return model.encode(text, add_special_tokens=add_special_tokens) if rendered is None else rendered.encode(text)
        except TypeError:  # raised by `tokenizers` for text that is not valid Unicode
            raise TokenizationFailed(f"{param} is not valid Unicode: it has half of a surrogate pair", param=param) from None

    aside = generates and len(text) > _INLINE_CHARACTERS
    with model.engine.expecting(call.client, len(text) / _TOKEN_CHARACTERS, call.deadline) if aside else nullcontext():
        encoded = await inline_or_aside(catalog, call, len(text), ids)
    if encoded:
        return encoded
    decoder = model.manifest.decoder
    if decoder is None or decoder.bos_token_id is None:
        raise EmptyInput(f"`{param}` has no tokens, and this model has no token that begins a text: send at least one token", param=param)
    return [decoder.bos_token_id]


# From a conversation -------------------------------------------------------------------------------------------------------------------


async def encode_chat(
    model: Generator,
    catalog: Catalog,
    call: Call,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    param: str,
    *,
    add_generation_prompt: bool = True,
    generates: bool = True,
) -> list[int]:
    """Render a conversation and its tools with the model's chat template, and return the token ids."""
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
    return await encode(model, catalog, call, prompt, param, rendered=prompts, generates=generates)


def most_tokens(model: Generator, max_tokens: int, prompt_tokens: int) -> int:
    """Return how many tokens a completion can have: `max_tokens`, or fewer if the model has a limited number of positions."""
    n_positions = None if model.manifest.decoder is None else model.manifest.decoder.n_positions
    return max_tokens if n_positions is None else max(0, min(max_tokens, n_positions - prompt_tokens + 1))


# Used for answers ----------------------------------------------------------------------------------------------------------------------


def bound_unread(runs: Runs, top_logprobs: int | None, settings: Settings) -> None:
    """Limit the memory for tokens of a stream that the client has not read yet. The limit is about `max_answer_bytes`."""
    runs.bound_unread(settings.max_answer_bytes / (_TOKEN_BYTES + (0 if top_logprobs is None else 1 + top_logprobs) * _LOGPROB_BYTES))


def sequence_tokens(request: GenerationRequest, generated: int) -> int:
    """Return the length of a sequence: the tokens of the state at which it began, of its prompt, and those generated so far."""
    return (0 if request.start is None else request.start.position) + len(request.prompt) + generated


def window_warnings(model: Generator, tokens: int) -> dict[str, list[str]]:
    """Return the field `warnings` of an answer whose longest sequence has `tokens` tokens. There is none if the model attends to all."""
    decoder = model.manifest.decoder
    if decoder is None or decoder.window is None or tokens <= decoder.window:
        return {}
    first = decoder.first_kept or 0
    between = "may miss details of what stands between, which is summed up" if decoder.sums_up else "may ignore what stands between"
    said = (
        f"the text has {tokens} tokens and the model attends in full to {decoder.window} of them, the first {first} and the last "
        f"{decoder.window - first}: the answer {between}"
    )
    return {"warnings": [said]}


def token_text(token_id: int, model: Generator) -> str:
    """Return a single token as text. Bytes that are not a whole character become U+FFFD."""
    return model.vocabulary[token_id].decode(errors="replace")
