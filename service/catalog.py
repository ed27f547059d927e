"""The catalog opens the models that a process serves, and finds them by name and kind."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from export import contract
from service.call import Call, expect
from service.encoder_decoder.engine import open_encoder_decoder
from service.encoding.cache import VectorCache
from service.encoding.engine import open_encoder
from service.encoding.gpu.session import open_session
from service.encoding.maps import AttentionMaps, check_maps
from service.encoding.model import Encoder, Model
from service.encoding.selftest import SelfTest
from service.errors import ModelNotFound, NotReady, ServiceError, WrongKind
from service.generation.engine import open_decoder
from service.generation.model import DecoderModel, Generating, Generator
from service.overload.byte_shares import ByteShares
from service.runtime.budget import CpuBudget, available_cpus, share_out
from service.runtime.memory import Release
from service.runtime.onnx import Array, Session, SettingsConflict, in_a_line
from service.settings import Settings, changed, check_names
from service.states.opening import open_store
from service.states.record import Quota
from service.states.store import Store
from service.streams.lease import Leases
from service.telemetry.metrics import Metrics
from service.telemetry.state_store_metrics import StateStoreMetrics
from service.tokenization.threads import Tokenizers

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

log = logging.getLogger("attnserve")

ENCODER_KINDS, GENERATOR_KINDS = contract.kinds_of("encoder"), contract.kinds_of("generator")

Served = Model | Generator


_SWEEP_S = 60.0  # average seconds between two sweeps of the store by one process


async def _sweep(store: Store) -> None:
    """Remove expired states and documents from time to time."""
    while True:
        await asyncio.sleep(_SWEEP_S * random.uniform(0.5, 1.5))  # random, so that processes that share a store sweep at different times
        with contextlib.suppress(ServiceError):  # a failed sweep is harmless, because the next sweep does the same work
            while await store.call(lambda engine: engine.sweep()):  # other calls get in between
                pass


class Catalog:
    """The models of this process, and the resources that they share: CPUs, cache, tokenizer threads, metrics."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        open_session: Callable[..., Session] = open_session,
    ) -> None:
        """`open_session` opens the sessions of encoders."""
        self.settings = settings
        self.tracer: Tracer | None = None  # set by `load` if `otlp_endpoint` is set
        self._open_session = open_session
        self.metrics = metrics or Metrics()
        self.budget: CpuBudget = share_out(available_cpus(), runtime_threads=settings.threads)
        self.cache = VectorCache(settings.cache_bytes)
        self.tokenizers = Tokenizers(self.budget.tokenizer_threads)
        self.maps = AttentionMaps()
        self.release = Release()
        self.models: dict[str, Served] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self.states: Store | None = None  # opened by `load` if a decoder is served
        self.companions: dict[type, Any] = {}  # class -> an object of this class that other packages store for the lifetime of this catalog
        self._leases: Leases | None = None
        self.failure: str | None = None
        self.warm = asyncio.Event()  # set when loading has ended: `models` are ready, or `failure` contains the reason why not
        self.draining = False
        self.active = 0  # requests in progress
        self.body_shares = ByteShares("bodies", lambda: self.settings.max_pending_bytes)  # memory of the bodies of requests in progress
        self.answer_shares = ByteShares("answers", lambda: self.settings.max_pending_bytes)  # memory of large answers in progress
        self.metrics.active.set_function(lambda: self.active)

    def load(self) -> None:
        """Check, load, test and time every bundle. Blocks for seconds. Raises BundleError, SettingsError or SettingsConflict."""
        if not self.settings.bundles:
            raise contract.BundleError("there is no bundle to serve: name one with --bundle DIR or ATTNSERVE_BUNDLES")
        if self.tracer is None and self.settings.otlp_endpoint is not None:
            from service.telemetry.tracing import to_collector  # slow to import, and from an optional extra

            self.tracer = to_collector(str(self.settings.otlp_endpoint))
        models: dict[str, Served] = {}
        with ThreadPoolExecutor() as readers:  # threads, because computing the hashes of the bundles releases the GIL
            manifests = list(readers.map(contract.verify, self.settings.bundles))
            check_names(self.settings, [manifest.name for manifest in manifests])
            if self.states is None and any(manifest.traits.part == "decoder" for manifest in manifests):
                self.states = open_store(self.settings.states, StateStoreMetrics(self.metrics))
            checks = [readers.submit(self.check_maps, *each) for each in zip(self.settings.bundles, manifests, strict=True)]
            for bundle, manifest in zip(self.settings.bundles, manifests, strict=True):
                model = self._opened(bundle, manifest)
                models[model.name] = model
                told = {"model": model.name, "kind": manifest.kind, "fingerprint": manifest.fingerprint[:12]}
                log.info("loaded", extra=told | {"provider": model.provider, "threads": self.budget.runtime_threads})
            for check in checks:
                check.result()
        self.models = models

    def _opened(self, bundle: Path, manifest: contract.Manifest) -> Served:
        """Open a model with its engine. Any error of a library becomes a BundleError with a message of one sentence."""
        shared = bundle, manifest, self.settings, self.metrics
        try:
            if manifest.traits.part == "decoder":
                decoder = DecoderModel(*shared)
                decoder.engine = self.open_generator(decoder)
                return decoder
            if manifest.traits.part == "encoder_decoder":
                both = Generator(*shared)
                both.engine = self.open_encoder_decoder(both)
                return both
            encoder = Model(*shared, self.tokenizers, self.answer_shares)
            encoder.engine, encoder.provider, encoder.selftest = self.open_encoder(encoder)
            return encoder
        except (contract.BundleError, SettingsConflict):
            raise
        except Exception as error:
            log.exception("a bundle cannot be served", extra={"model": manifest.name})
            raise contract.BundleError(f"{bundle} cannot be served: {type(error).__name__}: {in_a_line(error)}") from error

    # Opening engines; `service/pools/catalog.py` overrides these -------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect to engines in other processes. Does nothing here, because this class opens its engines itself. Call it on the event loop,
        before `load`.
        """

    def open_encoder(self, model: Model) -> tuple[Encoder, str, SelfTest]:
        """Open the engine of an encoder. Returns the engine, the name of its provider and the result of its self-test."""
        threads = self.budget.runtime_threads
        return open_encoder(model, self.settings, threads=threads, cache=self.cache, tracer=self.tracer, open_session=self._open_session)

    def open_generator(self, model: DecoderModel) -> Generating:
        """Open the engine of a decoder."""
        assert self.states is not None
        return open_decoder(model, self.settings, threads=self.budget.runtime_threads, store=self.states, tracer=self.tracer)

    def open_encoder_decoder(self, model: Generator) -> Generating:
        """Open the engine of an encoder-decoder."""
        return open_encoder_decoder(model, self.settings, threads=self.budget.runtime_threads, tracer=self.tracer)

    @property
    def leases(self) -> Leases | None:
        """Return the leases of streams that clients can continue, or None without a store. Call it on the event loop."""
        if self._leases is None and self.states is not None:
            self._leases = Leases(self.states, Quota(self.settings.max_states, self.settings.max_state_bytes), self.metrics)
        return self._leases

    def check_maps(self, bundle: Path, manifest: contract.Manifest) -> None:
        """Raise BundleError if the bundle's attention graph fails its test. Runs on another thread, in parallel with loading."""
        check_maps(bundle, manifest)

    def expect(self, call: Call, size_bytes: float, what: str) -> None:
        """Reserve memory for the answer of `call`; see `expect` in `service/call.py`."""
        expect(call, size_bytes, self.settings.max_answer_bytes, self.answer_shares, what)

    async def attention(self, model: Served, ids: Sequence[int], layers: Sequence[int], deadline: float) -> list[Array]:
        """Return the attention weights of a text of N tokens in each of `layers`: one array (H, N, N) for each layer. The model must have
        an attention graph.
        """
        return await self.maps.of(model.bundle, model.manifest, ids, layers, deadline)

    # -------------------------------------------------------------------------------------------------------------------------------------

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Change live settings, which are read for each request. If a setting is invalid or not live, raises SettingsError and changes none
        of them.
        """
        self.settings = changed(self.settings, changes)
        for encoder in self.encoders.values():
            encoder.settings = self.settings
        log.setLevel(self.settings.log_level.upper())

    def start(self) -> None:
        """Start the engines. Call this on the event loop, after `load`."""
        for model in self.models.values():
            model.engine.start()
        if self.states is not None:
            self._sweeping = asyncio.create_task(_sweep(self.states))

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for model in self.models.values():
            await model.engine.stop()
            if model.chat_prompts is not None:
                model.chat_prompts.close()
        if self._leases is not None:
            await self._leases.stop()
        if self.states is not None:
            await asyncio.to_thread(self.states.close)
        self.tokenizers.close()
        self.maps.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait until the accepted ones are finished. Returns how many requests were unfinished
        after `timeout_s` seconds.
        """
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.active and time.monotonic() < deadline:  # noqa: ASYNC110  an event would cost time in every request, polling only here
            await asyncio.sleep(0.02)
        return self.active

    def get(self, name: str | None, *kinds: str) -> Model:
        """Return the encoder, reranker or classifier with this name or alias. If `kinds` are given, the model must be of one of them.

        Without a name, returns the first served model of the first kind in `kinds` that any model has. Raises ModelNotFound, WrongKind or
        NotReady.
        """
        return cast(Model, self.find(name or (None if kinds else self.first(ENCODER_KINDS)), *(kinds or ENCODER_KINDS)))

    def generator(self, name: str | None) -> DecoderModel:
        """Return the decoder with this name or alias, or the first served decoder if `name` is None. Raises ModelNotFound, WrongKind or
        NotReady.
        """
        return cast(DecoderModel, self.find(name, "decoder"))

    def encoder_decoder(self, name: str | None) -> Generator | None:
        """Return the encoder-decoder that a request for text names, or None if the request names a decoder or a model that is not served.

        Without a name, the request means the first served model that writes text. Raises WrongKind if the model writes no text, or
        NotReady.
        """
        model = (self._named(name) or self._default(GENERATOR_KINDS)) if name else next(iter(self.generators.values()), None)
        if model is not None and model.manifest.kind not in GENERATOR_KINDS:
            raise _wrong_kind(model, GENERATOR_KINDS)
        if model is None or model.manifest.traits.part != "encoder_decoder":
            return None
        self.check(model)
        return cast(Generator, model)

    @property
    def encoders(self) -> dict[str, Model]:
        """The models that compute vectors and scores."""
        return {name: cast(Model, model) for name, model in self.models.items() if model.manifest.traits.pool == "encoder"}

    @property
    def generators(self) -> dict[str, Generator]:
        """The models that write texts."""
        return {name: cast(Generator, model) for name, model in self.models.items() if model.manifest.traits.pool == "generator"}

    def first(self, kinds: Sequence[str]) -> str | None:
        """Return the name of the first served model of any of these kinds, or None."""
        return next((name for name, model in self.models.items() if model.manifest.kind in kinds), None)

    def find(self, name: str | None, *kinds: str) -> Served:
        """Return the model with this name or alias. Raises ModelNotFound, NotReady, or WrongKind if the model is of none of `kinds`.

        Without a name, returns the first served model of the first kind in `kinds` that any model has. If the named model is not served,
        returns the first model of the setting `default_model` whose kind is in `kinds`, if there is one.
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
        """For each of `kinds` in order, look in the setting `default_model` for a model of this kind. Return the first one found, or
        None.
        """
        defaults = [self._named(name) for name in self.settings.default_model]
        return next((model for kind in kinds for model in defaults if model is not None and model.manifest.kind == kind), None)

    def check(self, model: Served) -> None:
        """Raise NotReady if an engine thread has died or a runtime call hangs. Queued requests stay queued until their deadlines."""
        if reason := self._ailment(model):
            raise NotReady(reason)

    async def ready(self) -> bool:
        """Return whether every model is loaded and healthy, and the files of the store are intact. A model whose last run failed is probed,
        and counts as healthy if the probe succeeds.
        """
        if not self.models or self.draining:
            return False
        for model in self.models.values():
            if not await self.answers(model):
                return False
        return self.why_not_ready() is None

    async def answers(self, model: Served) -> bool:
        """Return whether the model can answer: its engine works, and its last run succeeded or a probe succeeds now."""
        answers = self._ailment(model) is None and (model.engine.healthy or await self._probe(model))
        model.metrics.ready.set(answers)
        return answers

    def sick(self) -> str | None:
        """Return the first engine failure that can be repaired only by a new process, or None if there is no such failure."""
        return next(filter(None, map(self._ailment, self.models.values())), None)

    def why_not_ready(self) -> str | None:
        """Return a failure that lasts until the service is started again, or None. A store that is away or full may come back."""
        trouble = None if self.states is None else self.states.trouble()
        return self.failure or self.sick() or (trouble.sentence if trouble is not None and trouble.reason in ("lost", "damaged") else None)

    def _ailment(self, model: Served) -> str | None:
        """Return the failure of the model's engine (a dead thread, or a runtime call longer than `stuck_after_s`), or None."""
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


def _wrong_kind(model: Served, kinds: Sequence[str]) -> WrongKind:
    return WrongKind(f"model {model.name} is of kind {model.manifest.kind}; this route needs: {', '.join(kinds)}", param="model")
