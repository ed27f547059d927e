"""Applications whose decoder is the real engine over `FakeSteps`, on a store that outlives them; and their streams, event by event."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from service.app import Application, build_app
from service.generation.chat.prompt import ChatPrompts
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.sampling.grammar import Grammars
from service.generation.text import Vocabulary
from service.settings import Settings
from service.states.store import Store
from tests.service.fakes import PATIENCE_S, client
from tests.service.generation.fake_steps import EOS, VOCAB_SIZE, FakeSteps
from tests.service.generation_fakes import CALL_TEMPLATE, FakeGenerator, FakeGeneratorCatalog, _chat_template, _manifest

MODEL = "tiny"
_GROWING = ("text", "content", "arguments")


class RealGenerator(FakeGenerator):
    """A decoder without weights whose engine is the real one."""

    def __init__(self, tokenizer: Path, *, numerics: str = "here") -> None:
        super().__init__(MODEL, template=None)
        self.tokenizer, specials = Tokenizer.from_file(str(tokenizer)), Tokenizer.from_file(str(tokenizer))
        self.tokenizer.encode_special_tokens = True
        self.vocabulary = Vocabulary(tokenizer)
        self.manifest = _manifest(MODEL, "decoder", VOCAB_SIZE, None)
        self.chat_prompts = ChatPrompts(_chat_template(CALL_TEMPLATE), self.tokenizer, specials)
        self.eos_token_ids = (EOS,)
        self.steps = FakeSteps()
        self.engine = GeneratorEngine(  # type: ignore[assignment]
            self.steps,
            self.vocabulary,
            eos_token_ids=(EOS,),
            grammars=Grammars(tokenizer, (EOS,)),
            numerics=numerics,
            limits=GeneratorLimits(max_wait_s=PATIENCE_S, max_bulk_wait_s=PATIENCE_S),
            metrics=self.metrics,
        )


class StoringCatalog(FakeGeneratorCatalog):
    """A catalog on a store that stays open when it stops, as if the store were a server."""

    def __init__(self, generators: Sequence[FakeGenerator], settings: Settings, store: Store | None) -> None:
        super().__init__(generators, settings)
        self._store = store

    def load(self) -> None:
        super().load()
        if self.states is not None:
            self.states.close()
        self.states = self._store

    async def stop(self) -> None:
        leases, self.states = self.leases, None
        if leases is not None:
            await leases.stop()
        await super().stop()


def storing_app(generator: RealGenerator, store: Store | None, **settings: Any) -> Application:
    catalog = StoringCatalog([generator], Settings(**{"threads": 1, "stream_interval_s": 0, **settings}), store)
    app = build_app(catalog)
    app.state.catalog = catalog
    return app


@dataclass
class Event:
    """One event of a stream. `data`: parsed, or `[DONE]`; None if it has none."""

    id: str | None
    data: Any
    retry: int | None = None

    @property
    def tokens(self) -> list[int]:
        """Of each choice, by its id."""
        return [int(each.rstrip("be")) for each in (self.id or "").split(":")[1].split(",")]


def parsed(stream: str) -> list[Event]:
    """The events of a stream, by the rules of the HTML standard."""
    events, id_, retry, data = [], None, None, list[str]()
    for line in stream.split("\n"):
        name, _, value = line.partition(":")
        if name == "id":
            id_ = value.strip()
        elif name == "retry":
            retry = int(value)
        elif name == "data":
            data.append(value.strip())
        elif not line and (data or retry is not None):
            text = "\n".join(data)
            events.append(Event(id_, None if not data else text if text == "[DONE]" else json.loads(text), retry))
            retry, data = None, []
    return events


@dataclass
class Answer:
    """What a client puts together from the events of a stream. `choices`: by index, the parts that are texts or lists joined."""

    id: str | None = None
    created: int | None = None
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: Any = None
    done: bool = False
    error: Any = None

    @classmethod
    def of(cls, events: Sequence[Event]) -> "Answer":
        answer = cls()
        for event in events:
            answer.add(event.data)
        return answer

    def add(self, data: Any) -> None:
        if data is None:
            return
        if data == "[DONE]":
            self.done = True
        elif "error" in data:
            self.error = data["error"]
        else:
            assert self.id in (None, data["id"])
            assert self.created in (None, data["created"])
            self.id, self.created, self.usage = data["id"], data["created"], data.get("usage") or self.usage
            for choice in data["choices"]:
                flat = {**choice, **choice.get("delta", {})}
                flat.pop("delta", None)
                _merge(self.choices.setdefault(choice["index"], {}), flat)


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, str) and isinstance(into.get(name), str) and name in _GROWING:
            into[name] += value
        elif isinstance(value, dict):
            into[name] = into.get(name) or {}
            _merge(into[name], value)
        elif isinstance(value, list) and name == "tool_calls":
            for each in value:
                calls = into.setdefault(name, {})
                _merge(calls.setdefault(each["index"], {}), each)
        elif isinstance(value, list):
            into[name] = (into.get(name) or []) + value
        elif value is not None or name not in into:
            into[name] = value


@asynccontextmanager
async def gateway(tokenizer: Path, store: Store | None, *, numerics: str = "here", **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service that shares a store with others."""
    generator = RealGenerator(tokenizer, numerics=numerics)
    app = storing_app(generator, store, **settings)
    try:
        async with client(app) as http:
            http.app, http.model = app, generator  # type: ignore[attr-defined]
            yield http
    finally:
        generator.steps.open()
        await asyncio.sleep(0)
