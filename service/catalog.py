"""The models that a process serves, found by name and kind, and `Model.answer`, which computes the vectors and scores of all dialects."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tokenizers import Tokenizer

from export import contract
from service.call import Call, expect
from service.encoding.cache import VectorCache
from service.encoding.engine import EncoderEngine
from service.encoding.maps import AttentionMaps, check_maps
from service.encoding.request import EncodeAnswer, EncodeRequest, EncodeTask, OnRow, RowOrError
from service.encoding.selftest import SelfTest, check_golden, measure_rate
from service.errors import (
    BatchTooLarge,
    DeadlineExceeded,
    EmptyInput,
    InputTooLong,
    ModelNotFound,
    NeverFits,
    NotReady,
    Overloaded,
    ServiceError,
    WrongKind,
)
from service.generation.admission import QueueLimits
from service.generation.chat.prompt import ChatPrompts
from service.generation.device import open_steps
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.model import Generating, GeneratorModel
from service.generation.sampling.grammar import Grammars
from service.generation.selftest import check_golden as check_decoder
from service.generation.session import StepSession
from service.overload.byte_shares import ByteShares
from service.overload.encoder import EncoderLimits
from service.runtime.budget import CpuBudget, available_cpus, share_out
from service.runtime.engine_protocol import Engine
from service.runtime.lanes import Lane
from service.runtime.memory import Release
from service.runtime.onnx import CUDA, Array, OnnxSession, Session, SettingsConflict, in_a_line
from service.seq2seq.engine import WritingEngine
from service.seq2seq.model import WritingModel
from service.seq2seq.selftest import check_golden as check_writer
from service.seq2seq.session import OnnxWritingSession
from service.settings import Settings, changed, check_names
from service.telemetry.metrics import Metrics, ModelMetrics
from service.tokenization.texts import Cut, Encoded, Input, TextEncoder, size_of
from service.tokenization.threads import LONG_CHARACTERS, Tokenizers

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

log = logging.getLogger("attnserve")

ENCODER_KINDS, GENERATOR_KINDS = contract.kinds_of("encoder"), contract.kinds_of("generator")

# Up to here tokenising holds the event loop too shortly to be worth the way to another thread and back.
_INLINE_CHARACTERS = 4_000
_PIECE_CHARACTERS = 100_000


class Encoder(Engine, Protocol):
    """What a model needs of its engine, wherever that is; see `service/encoding/engine.py`."""

    limits: EncoderLimits

    def check(self, lane: Lane, client: str = ...) -> None: ...

    async def run(self, task: EncodeTask) -> list[RowOrError]: ...

    async def probe(self, inputs: Sequence[Encoded], output: str, deadline: float) -> None: ...


@dataclass(frozen=True)
class Opened:
    """An encoder that can be asked."""

    engine: Encoder
    provider: str
    selftest: SelfTest


class Model:
    """One bundle, loaded. `answer` is the only way in."""

    chat_prompts: ChatPrompts | None = None

    def __init__(self, bundle: Path, manifest: contract.Manifest, catalog: "Catalog") -> None:
        settings = catalog.settings
        self.bundle = bundle
        self.manifest = manifest
        self.name = manifest.name
        self.settings = settings
        self.metrics = ModelMetrics(catalog.metrics, self.name)
        self.texts = TextEncoder(
            bundle / contract.TOKENIZER,
            max_tokens=manifest.limits.max_tokens,
            vocab_size=manifest.limits.vocab_size,
            pair_types=any(tensor.name == contract.TOKEN_TYPE_IDS for tensor in manifest.graph.inputs),
            prompts=manifest.prompts,
            default_prompt=manifest.default_prompt,
            allow_special_tokens=settings.allow_special_tokens,
        )
        self._tokenizers = catalog.tokenizers
        self._answers = catalog.answer_shares
        opened = catalog.open_encoder(self)
        self.provider, self.selftest, self.engine = opened.provider, opened.selftest, opened.engine

    @property
    def output(self) -> str:
        """The graph output that answers by default."""
        return self.manifest.traits.output

    @property
    def tokenizer(self) -> Tokenizer:
        return self.texts.tokenizer

    def described(self) -> dict[str, Any]:
        """What a gateway needs to know of this model beside its bundle, in JSON's terms."""
        selftest = {name: value for name, value in asdict(self.selftest).items() if value is None or math.isfinite(value)}
        return {"selftest": selftest, "limits": asdict(self.engine.limits)}

    async def probe(self, deadline: float) -> None:
        """Compute something short. Raises what the engine raises."""
        encoded = self.texts.encode(["ready?"], cut=Cut())
        await self.engine.probe([item for item in encoded if isinstance(item, Encoded)], self.output, deadline)

    def vector_output(self, normalize: bool) -> str:
        return contract.EMBEDDING if normalize else contract.POOLED

    async def answer(self, request: EncodeRequest, call: Call, on_row: OnRow | None = None) -> EncodeAnswer:
        """The rows of the inputs. Raises the first input's error, unless `call.item_errors` asks for errors in the rows.

        `on_row` gets each row as soon as it is computed, and errors of inputs once the request is admitted.
        """
        call.model = self.name
        inputs, output = request.inputs, request.output or self.output
        self.check_size(len(inputs))
        lane = call.lane if call.lane is not None else Lane.BULK if len(inputs) > self.settings.bulk_inputs else Lane.INTERACTIVE
        call.bulk |= lane == Lane.BULK
        self.engine.check(lane, call.client)  # before the work of tokenising them
        encoded = await self._encode(inputs, call, request.cut or self.default_cut(), request.prompt)
        good = [(at, item) for at, item in enumerate(encoded) if isinstance(item, Encoded)]
        rows: list[RowOrError] = [item if isinstance(item, ServiceError) else NotReady("not computed") for item in encoded]
        _raise_first(encoded, call)
        answer = EncodeAnswer(rows, encoded)
        call.report(answer.truncated)
        self._expect(call, request, output, [len(item.ids) for _, item in good])
        call.tokens += answer.n_tokens  # now, so that a stream whose client leaves early is charged as well
        task = EncodeTask(
            inputs=[item for _, item in good],
            output=output,
            lane=lane,
            deadline=call.deadline,
            client=call.client,
            traceparent=call.traceparent,
            spent=call.spent,
            on_row=on_row and (lambda index, row: on_row(good[index][0], row)),
        )
        try:
            computed = await self.engine.run(task)
        except (Overloaded, NeverFits, NotReady):
            call.tokens -= answer.n_tokens
            raise
        _raise_first(computed, call)
        for (at, _), row in zip(good, computed, strict=True):
            rows[at] = row
        if on_row:  # last, so that a request is admitted or refused before its first line is sent
            for at, item in enumerate(encoded):
                if isinstance(item, ServiceError):
                    on_row(at, item)
        return answer

    def _expect(self, call: Call, request: EncodeRequest, output: str, lengths: Sequence[int]) -> None:
        """Reserve the bytes of the answer to inputs of these lengths, in tokens."""
        shape = next((tensor.shape for tensor in self.manifest.graph.outputs if tensor.name == output), ())
        width = request.row_width or (shape[-1] if shape and isinstance(shape[-1], int) else self.manifest.width or 1)
        rows, each = len(lengths), "inputs"
        if len(shape) > 2:
            rows, each = (len(lengths) * max(lengths, default=0), "padded tokens") if request.padded else (sum(lengths), "tokens")
        what = f"{rows} {each} of {width} numbers"
        expect(call, rows * width * request.number_bytes, self.settings.max_answer_bytes, self._answers, what)

    def default_cut(self, truncate: bool | None = None) -> Cut:
        """The cut of a request that says only yes, no or nothing."""
        wanted = self.settings.auto_truncate if truncate is None else truncate
        return Cut(side="right" if wanted else "none")

    def check_size(self, size: int) -> None:
        """EmptyInput or BatchTooLarge unless a request may have that many inputs."""
        if not size:
            raise EmptyInput("`input` cannot be empty", param="input")
        if size > self.settings.max_client_batch:
            raise BatchTooLarge(
                f"batch size {size} > maximum allowed batch size {self.settings.max_client_batch}; send it in parts", param="input"
            )

    async def _encode(self, inputs: Sequence[Input], call: Call, cut: Cut, prompt: str | None) -> list[Encoded | ServiceError]:
        started = time.monotonic()
        prefix = self.texts.default_prompt if prompt is None else prompt
        if prompt is None and prefix and any(isinstance(item, list) for item in inputs):
            prefix = ""  # ids come with everything that belongs to them; only a prompt that was asked for conflicts
        characters = sum(map(size_of, inputs))
        call.characters += characters
        if characters <= _INLINE_CHARACTERS:
            encoded = self.texts.encode(inputs, cut=cut, prompt=prefix)
        else:
            encoded = []
            for first, piece in self._pieces(inputs):
                if time.monotonic() > call.deadline:
                    raise DeadlineExceeded("the request's deadline passed while its inputs were tokenised")
                encode = partial(self.texts.encode, piece, cut=cut, prompt=prefix, first=first)
                encoded += await self._tokenizers.run(encode, size=sum(map(size_of, piece)), client=call.client)
        elapsed = time.monotonic() - started
        call.tokenization_s += elapsed
        self.metrics.tokenization.observe(elapsed)
        for item in encoded:
            if isinstance(item, Encoded):
                self.metrics.input_length.observe(len(item.ids))
                if item.truncated:
                    self.metrics.truncated.inc()
        return encoded

    def _pieces(self, inputs: Sequence[Input]) -> Iterator[tuple[int, Sequence[Input]]]:
        """The inputs in runs of about `_PIECE_CHARACTERS`, each with the index of its first. Between two of them others get their turn."""
        first, characters = 0, 0
        for at, item in enumerate(inputs):
            size, limit = size_of(item), self.settings.max_input_characters
            if size > limit:
                raise InputTooLong(f"input {at} has {size} characters and the most is {limit}: send it in parts", param="input")
            if characters and characters + size > LONG_CHARACTERS:  # a long text is a piece of its own
                yield first, inputs[first:at]
                first, characters = at, 0
            characters += size
            if characters > _PIECE_CHARACTERS:
                yield first, inputs[first : at + 1]
                first, characters = at + 1, 0
        if first < len(inputs):
            yield first, inputs[first:]


Served = Model | GeneratorModel | WritingModel


class Catalog:
    """All models of this process and what they share: CPUs, cache, tokenizer threads, metrics."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        open_session: Callable[..., Session] = OnnxSession,
        open_steps: Callable[..., StepSession[Any]] = open_steps,
    ) -> None:
        self.settings = settings
        self.tracer: Tracer | None = None  # of `load`, where traces are wanted
        self.open_session = open_session
        self.open_steps = open_steps
        self.metrics = metrics or Metrics()
        self.budget: CpuBudget = share_out(available_cpus(), runtime_threads=settings.threads)
        self.cache = VectorCache(settings.cache_bytes)
        self.tokenizers = Tokenizers(self.budget.tokenizer_threads)
        self.maps = AttentionMaps()
        self.release = Release()
        self.models: dict[str, Served] = {}
        self.failure: str | None = None
        self.warm = asyncio.Event()  # `models` answer, or `failure` says why they never will
        self.draining = False
        self.active = 0  # requests between their first byte and their last
        self.body_shares = ByteShares("bodies", lambda: self.settings.max_pending_bytes)  # of these
        self.answer_shares = ByteShares("answers", lambda: self.settings.max_pending_bytes)  # of these, where they are large
        self.metrics.active.set_function(lambda: self.active)

    def load(self) -> None:
        """Check, load, test and time every bundle. Blocks for seconds. Raises BundleError, SettingsError or SettingsConflict."""
        if not self.settings.bundles:
            raise contract.BundleError("there is no bundle to serve: name one with --bundle DIR or ATTNSERVE_BUNDLES")
        if self.tracer is None and self.settings.otlp_endpoint is not None:
            from service.telemetry.tracing import to_collector  # heavy, and of an extra: only where traces are wanted

            self.tracer = to_collector(str(self.settings.otlp_endpoint))
        models: dict[str, Served] = {}
        with ThreadPoolExecutor() as readers:  # every byte of every bundle is hashed, which leaves Python to others
            manifests = list(readers.map(contract.verify, self.settings.bundles))
            check_names(self.settings, [manifest.name for manifest in manifests])
            checks = [readers.submit(self.check_maps, *each) for each in zip(self.settings.bundles, manifests, strict=True)]
            for bundle, manifest in zip(self.settings.bundles, manifests, strict=True):
                model = self._whole(bundle, manifest)
                models[model.name] = model
                told = {"model": model.name, "kind": manifest.kind, "fingerprint": manifest.fingerprint[:12], "provider": model.provider}
                log.info("loaded", extra=told)
            for check in checks:
                check.result()
        self.models = models

    def _whole(self, bundle: Path, manifest: contract.Manifest) -> Served:
        """`_load`, with every failure as a BundleError of one sentence: libraries raise errors of many classes for broken files."""
        try:
            return self._load(bundle, manifest)
        except (contract.BundleError, SettingsConflict):
            raise
        except Exception as error:
            log.exception("a bundle cannot be served", extra={"model": manifest.name})
            raise contract.BundleError(f"{bundle} cannot be served: {type(error).__name__}: {in_a_line(error)}") from error

    def _load(self, bundle: Path, manifest: contract.Manifest) -> Served:
        return _OPENED[manifest.traits.part](bundle, manifest, self)

    # Opening engines; `service/pools/catalog.py` overrides these -------------------------------------------------------------------------

    async def connect(self) -> None:
        """Call this on the event loop, before `load`: connect to engines in other processes. The engines of this class are in this one."""

    def open_encoder(self, model: Model) -> Opened:
        """The engine of an encoder, tested and timed."""
        settings, manifest = self.settings, model.manifest
        session = self.open_session(
            model.bundle,
            manifest,
            threads=self.budget.runtime_threads,
            provider=settings.provider,
            gpu_memory_gib=settings.gpu_memory_gib,
        )
        selftest = check_golden(model.bundle, manifest, model.texts, session)
        rate = measure_rate(session, model.output, manifest.limits.max_tokens)
        on_gpu = session.provider == CUDA
        concurrent_runs = 2 if on_gpu else self.budget.runtime_threads  # on a GPU one is made ready while the other runs
        engine = EncoderEngine(
            session,
            fingerprint=manifest.fingerprint,
            limits=EncoderLimits(
                max_queue_tokens=settings.max_queue_tokens,
                max_batch_tokens=max(settings.max_batch_tokens or (16_384 if on_gpu else 512), manifest.limits.max_tokens),
                run_cost_tokens=rate.run_cost_tokens,
                tokens_per_s=rate.tokens_per_s * concurrent_runs,
                bulk_delay_s=settings.bulk_delay_s,
                concurrent_runs=concurrent_runs,
                max_wait_s=settings.max_wait_s,
                max_bulk_wait_s=settings.max_bulk_wait_s,
            ),
            metrics=model.metrics,
            cache=self.cache,
            tracer=self.tracer,
        )
        return Opened(engine, session.provider, selftest)

    def open_generator(self, model: GeneratorModel) -> Generating:
        """The engine of a decoder, tested."""
        session = self.open_steps(
            model.bundle,
            model.manifest,
            threads=self.budget.runtime_threads,
            provider=self.settings.provider,
            slots=self.settings.slots,
            gpu_memory_gib=self.settings.gpu_memory_gib,
        )
        check_decoder(model.bundle, session, model.encode)
        return GeneratorEngine(
            session,
            model.vocabulary,
            eos_token_ids=model.eos_token_ids,
            grammars=Grammars(model.bundle / contract.TOKENIZER, model.eos_token_ids),
            limits=GeneratorLimits(
                slots=self.settings.slots,
                max_prompt_tokens=self.settings.max_prompt_tokens,
                max_wait_s=self.settings.max_wait_s,
                max_bulk_wait_s=self.settings.max_bulk_wait_s,
            ),
            metrics=model.metrics,
            tracer=self.tracer,
        )

    def open_writer(self, model: WritingModel) -> Generating:
        """The engine of an encoder-decoder, tested."""
        session = OnnxWritingSession(model.bundle, model.manifest, threads=self.budget.runtime_threads, provider=self.settings.provider)
        check_writer(model.bundle, session, model.encode)
        limits = QueueLimits(
            slots=max(self.settings.slots, 8), max_wait_s=self.settings.max_wait_s, max_bulk_wait_s=self.settings.max_bulk_wait_s
        )
        return WritingEngine(session, model.vocabulary, limits=limits, metrics=model.metrics, tracer=self.tracer)

    def check_maps(self, bundle: Path, manifest: contract.Manifest) -> None:
        """BundleError for an attention graph that does not answer. Runs on another thread, in parallel with loading."""
        check_maps(bundle, manifest)

    def expect(self, call: Call, size_bytes: float, what: str) -> None:
        """See `answers.expect`."""
        expect(call, size_bytes, self.settings.max_answer_bytes, self.answer_shares, what)

    async def attention(self, model: Served, ids: Sequence[int], layers: Sequence[int], deadline: float) -> list[Array]:
        """What these layers attend to in a text, (H, N, N) each; the model has an attention graph."""
        return await self.maps.of(model.bundle, model.manifest, ids, layers, deadline)

    # -------------------------------------------------------------------------------------------------------------------------------------

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Change live settings, from the next request on. SettingsError, with nothing changed, if one of them is not live."""
        self.settings = changed(self.settings, changes)
        for encoder in self.encoders.values():
            encoder.settings = self.settings
        log.setLevel(self.settings.log_level.upper())

    def start(self) -> None:
        """Start the engines. Call this on the event loop, after `load`."""
        for model in self.models.values():
            model.engine.start()

    async def stop(self) -> None:
        for model in self.models.values():
            await model.engine.stop()
            if model.chat_prompts is not None:
                model.chat_prompts.close()
        self.tokenizers.close()
        self.maps.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait until the accepted ones are finished. Returns how many were unfinished after `timeout_s`."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.active and time.monotonic() < deadline:  # noqa: ASYNC110  an event would cost every request, this costs one shutdown
            await asyncio.sleep(0.02)
        return self.active

    def get(self, name: str | None, *kinds: str) -> Model:
        """The encoder, reranker or classifier of that name or alias; without a name the first of `kinds`, or of the pool without those.

        Raises ModelNotFound, WrongKind, NotReady.
        """
        return cast(Model, self.find(name or (None if kinds else self.first(ENCODER_KINDS)), *(kinds or ENCODER_KINDS)))

    def generator(self, name: str | None) -> GeneratorModel:
        """The same for a decoder."""
        return cast(GeneratorModel, self.find(name, "decoder"))

    def writer(self, name: str | None) -> WritingModel | None:
        """The encoder-decoder that a request for text names; None if it names a decoder, or no served model.

        Raises WrongKind for a model that writes no text, NotReady.
        """
        model = (self._named(name) or self._default(GENERATOR_KINDS)) if name else next(iter(self.generators.values()), None)
        if model is not None and model.manifest.kind not in GENERATOR_KINDS:
            raise _wrong_kind(model, GENERATOR_KINDS)
        if model is None or model.manifest.traits.part != "encoder_decoder":
            return None
        self.check(model)
        return cast(WritingModel, model)

    @property
    def encoders(self) -> dict[str, Model]:
        """The models that compute vectors and scores."""
        return {name: cast(Model, model) for name, model in self.models.items() if model.manifest.traits.pool == "encoder"}

    @property
    def generators(self) -> dict[str, GeneratorModel | WritingModel]:
        """The models that write texts."""
        found = {name: model for name, model in self.models.items() if model.manifest.traits.pool == "generator"}
        return cast(dict[str, GeneratorModel | WritingModel], found)

    def first(self, kinds: Sequence[str]) -> str | None:
        """The name of the first model of any of these kinds."""
        return next((name for name, model in self.models.items() if model.manifest.kind in kinds), None)

    def find(self, name: str | None, *kinds: str) -> Served:
        """The model of that name or alias, of one of `kinds` if there are any; without a name the first of them, an earlier kind first.

        A name that is not served means the first of `default_model` that is of these kinds, if there is one.
        """
        if not self.models:
            raise NotReady(self.failure or "the models are still being loaded")
        if not name:
            names = (self.first([kind]) for kind in kinds)
            model = self.models[next(filter(None, names), next(iter(self.models)))]
        elif (found := self._named(name) or self._default(kinds)) is not None:
            model = found
        else:
            raise ModelNotFound(
                f"The model `{name}` does not exist. Served: {', '.join([*self.models, *self.settings.aliases])}", param="model"
            )
        if kinds and model.manifest.kind not in kinds:
            raise _wrong_kind(model, kinds)
        self.check(model)
        return model

    def _named(self, name: str) -> Served | None:
        return self.models.get(self.settings.aliases.get(name, name))

    def _default(self, kinds: Sequence[str]) -> Served | None:
        """The first model of these kinds in `default_model`; an earlier kind comes first."""
        defaults = [self._named(name) for name in self.settings.default_model]
        return next((model for kind in kinds for model in defaults if model is not None and model.manifest.kind == kind), None)

    def check(self, model: Served) -> None:
        """Raise NotReady if the model's engine is dead or stuck. Queued work stays until its deadline or the end of the process."""
        if reason := self._ailment(model):
            raise NotReady(reason)

    async def ready(self) -> bool:
        """Whether every model is loaded and answers. A model whose last run failed is probed, so that it recovers without traffic."""
        if not self.models or self.draining:
            return False
        for model in self.models.values():
            if not await self.answers(model):
                return False
        return True

    async def answers(self, model: Served) -> bool:
        """Whether the model is healthy, or answers a probe again."""
        answers = self._ailment(model) is None and (model.engine.healthy or await self._probe(model))
        model.metrics.ready.set(answers)
        return answers

    def sick(self) -> str | None:
        """The first failure that only a new process can repair, or None."""
        return next(filter(None, map(self._ailment, self.models.values())), None)

    def _ailment(self, model: Served) -> str | None:
        """The failure of the model's engine: a dead thread, or a runtime call that does not end. None if it has none."""
        if not model.engine.alive:
            return f"a runtime thread of {model.name} is dead"
        if (stuck_s := model.engine.stuck_s) > (limit_s := self.settings.stuck_after_s):
            return f"a runtime call of {model.name} has not ended for {stuck_s:.0f} s, and the most is {limit_s:g} s (stuck_after_s)"
        return None

    async def _probe(self, model: Served) -> bool:
        deadline = time.monotonic() + 5
        try:
            await model.probe(deadline)
        except ServiceError as error:
            log.warning("probe failed", extra={"model": model.name, "error": str(error)})
            return False
        return model.engine.healthy


# How a bundle is opened, by the part of its manifest that only its kind has.
_OPENED: dict[str | None, Callable[[Path, contract.Manifest, Catalog], Served]] = {
    None: Model,
    "decoder": lambda bundle, manifest, catalog: GeneratorModel(
        bundle, manifest, catalog.settings, catalog.metrics, catalog.open_generator
    ),
    "encoder_decoder": lambda bundle, manifest, catalog: WritingModel(
        bundle, manifest, catalog.settings, catalog.metrics, catalog.open_writer
    ),
}


def _wrong_kind(model: Served, kinds: Sequence[str]) -> WrongKind:
    return WrongKind(f"model {model.name} is of kind {model.manifest.kind}; this route needs: {', '.join(kinds)}", param="model")


def _raise_first(results: Sequence[object], call: Call) -> None:
    """Raise the first error among the results, unless the request accepts errors by item."""
    for result in results:
        if isinstance(result, ServiceError) and not call.item_errors:
            raise result.with_traceback(None)  # equal inputs of several requests share their error
