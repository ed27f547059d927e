"""A decoder without a model: an engine that says what its script says, and an application around it.

`FakeEngine` draws nothing: each of its runs takes its tokens from a script. Its runs end, and hold text back, as those of the real engine
do, by `service/generation/sequence.py`. It can be held between two tokens and told to refuse or to fail, from any thread; it remembers its
requests.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from export import contract
from service.app import Application, build_app
from service.catalog import Catalog
from service.errors import InvalidRequest, ServiceError, WrongKind
from service.generation.chat.prompt import ChatPrompts
from service.generation.chat.template import ChatTemplate
from service.generation.request import Delta, GenerationRequest, Grammar, Token, TokenLogprob
from service.generation.run import Run
from service.generation.sequence import Sequence as EngineSequence
from service.generation.submission import Submission
from service.generation.text import TextStream, Vocabulary
from service.runtime.offered import OfferedSlots
from service.settings import Settings
from service.states.engine import StateEngine
from service.states.opening import open_store
from service.states.record import Keep
from service.states.store import Store
from service.telemetry.metrics import GeneratorMetrics, Metrics
from service.telemetry.usage import Usage
from tests.service import fakes
from tests.service.fakes import PATIENCE_S

BOS, EOS = 0, 1
SAID = "Once upon a time, there was a café."
TEMPLATE = """{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + TEMPLATE


def byte_tokenizer(*, bos: bool = True) -> Tokenizer:
    """Every byte is a token, after `<s>` and `</s>`; with `bos`, `<s>` stands before every text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": BOS, "</s>": EOS, **{letter: at + 2 for at, letter in enumerate(letters)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


class FakeEngine:
    """Says `script` to everybody: a text, ended by `</s>`, or a function from the request to one. Beyond its end it begins again."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.script: str | Callable[[GenerationRequest], str] = SAID
        self.refusal: BaseException | None = None  # raised by `submit`, by the one after `refuse_after`
        self.refuse_after = 0
        self.states: Store | None = None  # where it keeps states
        self.numerics = "fake"
        self.failures: dict[int, tuple[int, BaseException]] = {}  # by number of the run: after so many tokens, what
        self.cached_tokens = 0
        self.runs: list[FakeRun] = []
        self.healthy = self.alive = True
        self.stuck_s = 0.0
        self.pending = 0
        self.full = False
        self.offered = OfferedSlots(4)
        self._changed = threading.Condition()
        self._permits: int | None = None  # None: no gate

    @property
    def requests(self) -> list[GenerationRequest]:
        return [run.request for run in self.runs]

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def refused(self, runs: float) -> None:
        self.offered.refuse(runs)

    def has_numerics(self, numerics: str) -> bool:
        return numerics == self.numerics

    async def prepare(self, grammar: Grammar) -> None: ...

    def submit(self, request: GenerationRequest) -> "FakeRun":
        if self.refusal is not None and len(self.runs) >= self.refuse_after:
            raise self.refusal
        run = FakeRun(self, request, len(self.runs))
        with self._changed:
            self.runs.append(run)
            self._changed.notify_all()
        return run

    async def open(self, requests: Sequence[GenerationRequest], key: str = "") -> "list[FakeRun]":
        """All or none, as the engine has it."""
        for request in requests:
            if request.grammar is not None:
                await self.prepare(request.grammar)
        runs: list[FakeRun] = []
        try:
            for request in requests:
                runs.append(self.submit(request))  # noqa: PERF401  # an error leaves the runs so far, which are cancelled
        except BaseException:
            for run in runs:
                run.cancel()
            raise
        return runs

    async def probe(self, deadline: float) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.healthy = True

    def tokens(self, request: GenerationRequest) -> list[int]:
        """Everything the run would say, with its end of text where it has one."""
        script = self.script if isinstance(self.script, str) else self.script(request)
        said = [*self.tokenizer.encode(script, add_special_tokens=False).ids, EOS]
        return (said * (request.max_tokens // len(said) + 1) if request.ignore_eos else said)[: request.max_tokens]

    # What a test calls, from any thread ------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        states = self.states
        self.__init__(self.tokenizer, self.vocabulary)  # type: ignore[misc]
        self.states = states

    def hold(self, after: int = 0) -> None:
        """Let so many tokens out, of all runs together, and then none."""
        with self._changed:
            self._permits = after

    def release(self, tokens: int | None = None) -> None:
        """Let so many more out; None: all, from now on."""
        with self._changed:
            self._permits = None if tokens is None else (self._permits or 0) + tokens
        for run in self.runs:
            run.wake()

    def wait(self, condition: Callable[[], object]) -> None:
        """Until something about the runs is so."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S)

    # What a run calls ------------------------------------------------------------------------------------------------------------------

    def passes(self) -> bool:
        with self._changed:
            if self._permits is not None:
                if not self._permits:
                    return False
                self._permits -= 1
            return True

    def tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


class FakeRun(Run):
    """One run, a token at a time."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, number: int) -> None:
        now = time.monotonic()
        usage = Usage(len(request.prompt), cached_tokens=engine.cached_tokens, submitted=now, started=now)
        text = TextStream(
            engine.vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        super().__init__(request, usage, lambda run: self._stop(), None if request.stop else text)
        self.numerics = engine.numerics
        ends = frozenset((*(() if request.ignore_eos else (EOS,)), *request.stop_token_ids))
        submission = Submission[EngineSequence](request.client, request.lane, submitted=now, since=now)
        self._sequence = EngineSequence(self, text if request.stop else None, matcher=None, ends=ends, order=number, submission=submission)
        if request.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(logprob(token_id, request.prompt_logprobs) for token_id in request.prompt[1:])]
        if request.known:
            self._sequence.replay(request.known)
        self.ended = False
        self.number = number
        self._engine = engine
        self._tokens = engine.tokens(request)
        self._loop = asyncio.get_running_loop()
        self._may_go_on = asyncio.Event()
        self._speaking = self._loop.create_task(self._speak())

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._may_go_on.set)

    async def _speak(self) -> None:
        after, failure = self._engine.failures.get(self.number, (-1, None))
        while not self.ended:
            if failure is not None and self.usage.completion_tokens == after:
                self.fail(failure)  # type: ignore[arg-type]  # whatever it is
                return
            while not self._engine.passes():
                self._may_go_on.clear()
                await self._may_go_on.wait()
            made = self._next()
            if self.ended and self.request.keep is not None:
                try:
                    await self._keep(self.request.keep)
                except ServiceError as error:
                    self.fail(error)
                    return
            self.give(made)
            await asyncio.sleep(0)

    async def _keep(self, keep: Keep) -> None:
        """Store the ids of all tokens as if they were the state after the last one."""
        assert self._engine.states is not None
        drawn = () if self.request.max_tokens == 0 else self._tokens[: self.usage.completion_tokens]
        ids, start = np.array([*self.request.prompt, *drawn], "<i4").tobytes(), self.request.start

        def put(engine: StateEngine) -> None:
            parent = None if start is None else engine.get(start.tenant, start.id)
            blob = b"" if start is None else engine.blob(start.tenant, start.id)
            position = len(ids) // 4 + (0 if parent is None else parent.position)
            record = replace(keep.record, position=position, numerics=self._engine.numerics)
            made = engine.put(record, blob + ids, ids=ids, quota=keep.quota, name=keep.name, key=keep.key)
            if made.id != record.id:
                raise InvalidRequest("another request with this key was answered meanwhile")

        await self._engine.states.call(put)

    def _stop(self) -> None:
        self._speaking.cancel()
        self._engine.tell()

    def _next(self) -> Token | Delta:
        """What the run makes of the next token of the script, as it would of one that was drawn."""
        request = self.request
        if not request.max_tokens:
            self.ended = True
            return Delta("", finish_reason="length")
        token_id = self._tokens[self.usage.completion_tokens]
        self.usage.completion_tokens += 1
        self.usage.first_token = self.usage.first_token or time.monotonic()
        made = self._sequence.accept(token_id, None if request.top_logprobs is None else logprob(token_id, request.top_logprobs))
        self.ended = made.finish_reason is not None
        self._engine.tell()
        return made


def logprob(token_id: int, n_top: int) -> TokenLogprob:
    """As if 10, 11, 12, ... were always the likeliest tokens."""
    return TokenLogprob(token_id, -1.0 - token_id / 256, tuple((10 + rank, -0.125 * (rank + 1)) for rank in range(n_top)))


class FakeGenerator:
    """What `service/generation/model.py` is to the routes."""

    def __init__(self, name: str, *, template: str | None = TEMPLATE, kind: contract.Kind = "decoder", bos: bool = True) -> None:
        self.name = name
        self.created = 1_767_323_045
        self.tokenizer = byte_tokenizer(bos=bos)
        self.vocabulary = _vocabulary(self.tokenizer)
        self.manifest = _manifest(name, kind, self.tokenizer.get_vocab_size(), BOS if bos else None)
        self.engine = FakeEngine(self.tokenizer, self.vocabulary)
        self.metrics = GeneratorMetrics(Metrics(), name)
        specials = byte_tokenizer(bos=bos)
        self.tokenizer.encode_special_tokens = True
        self.chat_prompts = ChatPrompts(_chat_template(template), self.tokenizer, specials) if template is not None else None
        self.max_context: int | None = 131_072
        self.provider = "CPUExecutionProvider"
        self.eos_token_ids = (EOS,)

    def need(self, *kinds: str) -> None:
        if self.manifest.kind not in kinds:
            raise WrongKind(f"model {self.name} is of kind {self.manifest.kind}; this route needs: {', '.join(kinds)}", param="model")

    def described(self) -> dict[str, Any]:
        return {}

    async def probe(self, deadline: float) -> None:
        await self.engine.probe(deadline)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


@cache
def _chat_template(source: str) -> ChatTemplate:
    """Each has a process of its own, which takes a tenth of a second to start."""
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    with TemporaryDirectory() as folder:
        tokenizer.save(file := f"{folder}/tokenizer.json")
        return Vocabulary(Path(file))


def _manifest(name: str, kind: contract.Kind, vocab_size: int, bos: int | None) -> contract.Manifest:
    state = contract.StateTensor(name="state_0_S", shape=(2, 4))
    return contract.Manifest(
        name=name,
        kind=kind,
        precision="fp32",
        files=(),
        graph=contract.Graph(file=contract.GRAPH, opset=20, inputs=(), outputs=(), operators={}, optimisation="none"),
        limits=contract.Limits(max_tokens=131_072, vocab_size=vocab_size),
        source=contract.CheckpointSource(
            architecture="Fake", checkpoint="fake", weights_sha256="0" * 64, attention="linear", untrained=False
        ),
        parity=contract.Parity(max_abs_error=0.0, min_cosine=1.0, shapes=((1, 2),), tolerance=1e-5),
        decoder=contract.Decoder(states=(state,), takes_positions=False, bos_token_id=bos, eos_token_ids=(EOS,), exact=True),
        width=8,
        created="2026-01-02T03:04:05+00:00",
        tool="fakes",
    )


class FakeGeneratorCatalog(Catalog):
    """A catalog that has nothing to load."""

    def __init__(self, generators: Sequence[FakeGenerator], settings: Settings) -> None:
        super().__init__(settings)
        self._generators = generators
        self.settled = threading.Event()

    def load(self) -> None:
        models: dict[str, Any] = {generator.name: generator for generator in self._generators}
        self.models = models
        self.states = open_store(self.settings.states)
        for generator in self._generators:
            generator.engine.states = self.states

    def start(self) -> None:
        super().start()
        self.settled.set()

    def generator(self, name: str | None) -> Any:
        return self.find(name, "decoder")


def generator_app(*generators: FakeGenerator, **settings: Any) -> Application:
    """The application over these decoders, its catalog at `app.state.catalog`, themselves by name at `app.state.generators`."""
    make: type[FakeGeneratorCatalog] = FakeGeneratorCatalog
    if fakes.pooled:
        from tests.service.pool_fakes import FakeGeneratorGateway as make  # type: ignore[no-redef]
    catalog = make(generators, Settings(**{"threads": 1, "stream_interval_s": 0, **settings}))
    app = build_app(catalog, on_failure=catalog.settled.set)
    app.state.catalog = catalog
    app.state.generators = {generator.name: generator for generator in generators}
    return app


def events(stream: str) -> list[Any]:
    """The data of each event, `[DONE]` as the text it is. Comments are left out."""
    blocks = stream.split("\n\n")
    assert blocks.pop() == "", "the last event ends with an empty line"
    found = []
    for block in blocks:
        lines = [line for line in block.split("\n") if not line.startswith((":", "id: ", "retry: "))]
        if not lines:
            continue
        *kind, data = lines
        assert data.startswith("data: ")
        content = data.removeprefix("data: ")
        found.append(content if content == "[DONE]" else json.loads(content))
        assert kind in ([], [f"event: {found[-1]['type']}" if kind else ""])
    return found
