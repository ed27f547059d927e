"""Converts a client's request for text to requests to the engine: the state that they continue, their prompts, their sampling, and the
states to store after them."""

import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from service.call import Call
from service.catalog import Catalog
from service.dialects.states.finding import check_version, find, on_store, store_of
from service.dialects.states.options import Exactness, StateFields, StoreState
from service.dialects.states.records import new_record, quota_of
from service.dialects.text.schemas import SamplingFields, StreamOptions
from service.errors import EmptyInput, InputTooLong, InvalidRequest, NameMoved, TokenizationFailed
from service.generation.chat.continuation import following
from service.generation.chat.prompt import ChatPrompts
from service.generation.model import DecoderModel, Generator
from service.generation.request import GenerationRequest, Grammar, Sampling
from service.generation.runs import Runs
from service.states.engine import StateEngine
from service.states.record import Ancestor, Keep, NameChange, StateRecord, StateReference, Turn
from service.tokenization.threads import INLINE_CHARACTERS

Model = TypeVar("Model", bound=Generator)

EXACT_HEADER = "x-state-exact"  # "false": a machine that rounds differently made the state, and might draw other tokens
_NEAREST = 8  # ancestors that are searched first for the last token of a state, since a fork has no tokens of its own
_TOKEN_CHARACTERS = 4  # characters of a token, estimated before a text is tokenised; of a word in English
_TOKEN_BYTES, _LOGPROB_BYTES = 100, 120  # estimated memory in bytes of a token that is not yet sent, and of each of its log-probabilities
_SAMPLING = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


# The state that a request continues ------------------------------------------------------------------------------------------------------


class Beginning(NamedTuple):
    """A state to continue. `last_token`: id of the last token that was fed to the state, None if it is unknown."""

    record: StateRecord
    last_token: int | None
    exact: Exactness

    @property
    def reference(self) -> StateReference:
        return StateReference(self.record.tenant, self.record.id, self.exact == "strict", self.record.position)


async def beginning_of(catalog: Catalog, call: Call, reference: str | None, exact: Exactness, param: str = "state") -> Beginning | None:
    """Return the state with the id or name `reference`, or None if `reference` is None. Raises StateNotFound or StateGone."""
    if reference is None:
        return None

    def found(engine: StateEngine, tenant: str) -> Beginning:
        record = find(engine, tenant, reference, param).record
        last = _last_token(engine.lineage(tenant, record.id, _NEAREST))
        return Beginning(record, _last_token(engine.lineage(tenant, record.id)) if last is None else last, exact)

    return await on_store(catalog, call, found)


def _last_token(line: Sequence[Ancestor]) -> int | None:
    return next((int(np.frombuffer(each.ids, "<i4")[-1]) for each in line if each.ids), None)


# The request -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextCall(Generic[Model]):
    """A client's request for text: its model, and the state that its prompt continues."""

    model: Model
    call: Call
    catalog: Catalog
    begin: Beginning | None = None

    @staticmethod
    def of(name: str | None, begin: Beginning | None, call: Call, catalog: Catalog) -> "TextCall[DecoderModel]":
        """Return the request to the decoder `name`, or without a name to the state's decoder or the first one. Raises InvalidRequest if
        another model has made the state."""
        model = catalog.generator(name or (None if begin is None else begin.record.model))
        if begin is not None and begin.record.fingerprint != model.manifest.fingerprint:
            raise InvalidRequest(
                f"the state is of model {begin.record.model} with the fingerprint {begin.record.fingerprint[:12]}, and model {model.name} "
                f"has {model.manifest.fingerprint[:12]}: only the same model can continue it",
                param="model",
            )
        return TextCall(model, call, catalog, begin)

    # Prompts -----------------------------------------------------------------------------------------------------------------------------

    async def text(self, text: str, param: str = "prompt") -> list[int]:
        """Return the token ids of a prompt. After a state the text gets no special tokens, and may be empty."""
        if self.begin is not None and not text:
            return []
        return await self.encode(text, param, add_special_tokens=self.begin is None)

    async def messages(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        param: str,
        *,
        add_generation_prompt: bool = True,
        generates: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation, or of its next messages after a state, in the form of the model's chat template."""
        prompts, begin = self.model.chat_prompts, self.begin
        if prompts is None:
            raise InvalidRequest(
                f"model {self.model.name} has no chat template: use /v1/completions, or export it from a folder with a chat_template.jinja",
                param="model",
            )
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            if begin is None:
                text = await prompts.prompt(messages, **options)
            else:
                text = await following(prompts, messages, turn=begin.record.turn, **options)
        except InvalidRequest as error:
            error.param = param
            raise
        ids = await self.encode(text, param, rendered=prompts, generates=generates)
        return ids[1:] if begin is not None and begin.record.turn == "generated" and ids[0] == begin.last_token else ids

    async def encode(
        self, text: str, param: str, *, add_special_tokens: bool = True, rendered: ChatPrompts | None = None, generates: bool = True
    ) -> list[int]:
        """Return the token ids of a text. For an empty one, return the token that begins a text. Raises EmptyInput if the model has no such
        token.

        `rendered`: the model's chat prompts, if they rendered `text` from a conversation. They then tokenise the text instead of the model.
        `generates`: the engine will be asked to continue the prompt. Raises QueueTooLong, before the text is tokenised, if the engine
        cannot begin it in time.
        """
        model, call = self.model, self.call
        if len(text) > (limit := self.catalog.settings.max_input_characters):
            raise InputTooLong(f"`{param}` has {len(text)} characters and the maximum context length is {limit}: shorten it", param=param)

        def ids() -> list[int]:
            try:
                return model.encode(text, add_special_tokens=add_special_tokens) if rendered is None else rendered.encode(text)
            except TypeError:  # raised by `tokenizers` for text that is not valid Unicode
                raise TokenizationFailed(f"{param} is not valid Unicode: it has half of a surrogate pair", param=param) from None

        aside = generates and len(text) > INLINE_CHARACTERS
        with model.engine.expecting(call.client, len(text) / _TOKEN_CHARACTERS, call.deadline) if aside else nullcontext():
            if encoded := await self.catalog.tokenizers.run(ids, size=len(text), client=call.client):
                return encoded
        decoder = model.manifest.decoder
        if decoder is None or decoder.bos_token_id is None:
            raise EmptyInput(
                f"`{param}` has no tokens, and this model has no token that begins a text: send at least one token", param=param
            )
        return [decoder.bos_token_id]

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise TokenizationFailed if an id is outside the model's vocabulary."""
        if ids and (worst := max(ids)) >= (size := self.model.manifest.limits.vocab_size):
            raise TokenizationFailed(f"token id {worst} in {param} is outside this model's vocabulary of {size}", param=param)

    # Requests to the engine --------------------------------------------------------------------------------------------------------------

    def requests(
        self,
        body: SamplingFields,
        prompts: Sequence[list[int]],
        *,
        n: int = 1,
        max_tokens: int,
        max_tokens_field: str,
        grammar: Grammar | None,
        prompt_logprobs: int | None = None,
        drawn: Sequence[int] | None = None,
        turn: Turn = "",
        **options: Any,
    ) -> list[GenerationRequest]:
        """Return n engine requests for each prompt: the n choices of the first prompt, then those of the second, and so on. Each begins at
        the state `begin`. If the body has `store_state`, it also has the record of the state to store after its last token.

        The seed of a choice depends only on its index and on its prompt's seed. `drawn` has one seed for each prompt; if it is None, the
        function `seeds` draws them. A prompt's log-probabilities are computed for its first choice only. `max_tokens_field`: the body's
        name for `max_tokens`, for errors. `turn`: whose message the text ends. `options`: further fields of GenerationRequest.
        """
        if body.min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens={body.min_tokens} is more than {max_tokens_field}={max_tokens}", param="min_tokens")
        sampling = Sampling(
            seed=0,
            top_k=max(body.top_k, 0),
            logit_bias=self._bias(body.logit_bias),
            allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids)),
            **{name: getattr(body, name) for name in _SAMPLING},
        )
        self.check_ids(body.stop_token_ids, "stop_token_ids")
        self.check_ids(body.allowed_token_ids, "allowed_token_ids")
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        requests = [
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
                cache_salt=body.cache_salt,
                start=None if self.begin is None else self.begin.reference,
                **self.call.origin,
                **options,
            )
            # The n choices of a prompt share one tuple of ids, which the engine checks once.
            for prompt, seed in zip(map(tuple, prompts), drawn or seeds(body.seed, len(prompts)), strict=True)
            for index in range(n)
        ]
        return self._with_states(requests, body, turn) if isinstance(body, StateFields) and body.store_state else requests

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 11):
                raise InvalidRequest(f"logit_bias has the key {key[:80]!r}, which is no token id", param="logit_bias")
            bias[int(key)] = value
        self.check_ids(list(bias), "logit_bias")
        return bias

    def _with_states(self, requests: Sequence[GenerationRequest], body: StateFields, turn: Turn) -> list[GenerationRequest]:
        """Return the requests, each with the record of the state to store after its last token."""
        options = body.store_state if isinstance(body.store_state, StoreState) else StoreState.model_validate({})
        change = _change(body)
        if change is not None and len(requests) > 1:
            raise InvalidRequest(f"one name cannot point to the states of {len(requests)} texts: leave it out", param="store_state.name")
        if options.name_version is not None and change is None:
            raise InvalidRequest("name_version is about a name: send `store_state.name`", param="store_state.name_version")
        store_of(self.catalog)
        settings, begin = self.catalog.settings, self.begin
        about: dict[str, Any] = {
            "tenant": self.call.tenant_name,
            "model": self.model.name,
            "fingerprint": self.model.manifest.fingerprint,
            "parent": None if begin is None else begin.record.id,
            "origin": "prompt" if begin is None else "continuation",
            "turn": turn,
        }
        records = (new_record(options, settings, **about) for _ in requests)
        return [
            replace(request, keep=Keep(record=record, quota=quota_of(settings), name=change))
            for request, record in zip(requests, records, strict=True)
        ]

    async def check_name(self, body: StateFields) -> None:
        """Raise NameMoved if the version of the name in `store_state` is not the expected one. Call this before anything is computed."""
        if (change := _change(body)) is not None and change.version is not None:
            try:
                await on_store(self.catalog, self.call, check_version, change)
            except NameMoved as error:
                error.param = "store_state.name_version"
                raise

    async def submit(self, requests: Sequence[GenerationRequest], *, n: int = 1, prompt_field: str, stream: bool) -> Runs:
        """Submit the requests to the engine, as `Runs.submit` does, and return their runs.

        For a stream, limit the memory for tokens that the client has not read yet. The limit is about `max_answer_bytes`.
        """
        runs = await Runs.submit(self.model, requests, self.call, n=n, prompt_field=prompt_field, stream=stream)
        tell_exactness(self.call, self.begin, runs)
        if stream:
            top = requests[0].top_logprobs
            token_bytes = _TOKEN_BYTES + (0 if top is None else 1 + top) * _LOGPROB_BYTES
            runs.bound_unread(self.catalog.settings.max_answer_bytes / token_bytes)
        return runs


def seeds(seed: int | None, prompts: int) -> tuple[int, ...]:
    """Return a seed for each prompt: the request's seed for all of them, or a random seed for each."""
    return tuple(secrets.randbits(63) if seed is None else seed for _ in range(prompts))


def seed_of(seed: int, index: int) -> int:
    """Return the 63-bit seed of choice `index`. It does not depend on the number of choices."""
    digest = blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# What routes check and tell --------------------------------------------------------------------------------------------------------------


def check_streaming(stream: bool, options: StreamOptions | None) -> None:
    if options is not None and options.include_usage and not stream:
        raise InvalidRequest("stream_options.include_usage needs stream=true", param="stream_options")


def check_prompt_logprobs(prompt_logprobs: int | None, state: str | None, *, stream: bool) -> None:
    """Raise InvalidRequest if a request that continues a state, or a stream, asks for the log-probabilities of its prompt."""
    if prompt_logprobs is not None and state is not None:
        raise InvalidRequest("prompt_logprobs cannot be combined with state: leave one of them out", param="prompt_logprobs")
    if prompt_logprobs is not None and stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: send stream=false", param="prompt_logprobs")


def _change(body: StateFields) -> NameChange | None:
    asked = body.store_state
    return NameChange(asked.name, asked.name_version) if isinstance(asked, StoreState) and asked.name is not None else None


def tell_exactness(call: Call, begin: Beginning | None, runs: Runs) -> None:
    """Set the header x-state-exact to "false" if the arithmetic of the runs' engine differs from the arithmetic that made their state."""
    if begin is not None and begin.exact == "best_effort" and begin.record.numerics != runs.runs[0].numerics:
        call.headers[EXACT_HEADER] = "false"


def kept(request: GenerationRequest) -> dict[str, Any] | None:
    """Return the JSON of the state that was stored after the request's last token, or None if there is no such state."""
    if (keep := request.keep) is None or keep.gone:
        return None
    record = keep.record
    return {
        "object": "state",
        "id": record.id,
        "parent": record.parent,
        "name": None if keep.name is None else keep.name.name,
        "expires": None if record.expires is None else int(record.expires),
    }
