"""A decoder's engine. It alternates between a decode step for all running sequences and a chunk of prefill.

`step_engine.py` has the loop, and `decoding.py` what it computes. `intake.py` makes a run from a request, and `saved/run_states.py` loads
and stores states. This file has what a decoder's engine does on the event loop, and opens it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from export import contract
from service.generation.admission import Admission, QueueLimits
from service.generation.decoding import Decoding
from service.generation.gpu.session import open_steps
from service.generation.intake import Intake, PromptWork
from service.generation.model import DecoderModel
from service.generation.request import FinishReason, GenerationRequest
from service.generation.run import Run
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.sampler import SAMPLER_VERSION
from service.generation.saved.keeper import StateKeeper
from service.generation.saved.prefix_cache import PrefixCache
from service.generation.saved.prefixes import Prefixes
from service.generation.saved.run_states import RunStates
from service.generation.saved.shared_prefixes import SharedPrefixes
from service.generation.selftest import check_golden
from service.generation.sequence import Sequence
from service.generation.session import StepSession
from service.generation.step_engine import Once, StepEngine
from service.generation.submission import Submission
from service.generation.text import Vocabulary
from service.runtime.pacing import hand_over_s
from service.settings import Settings
from service.states.numerics import numerics_fingerprint
from service.states.store import Store
from service.telemetry.metrics import GeneratorMetrics

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer


@dataclass(frozen=True, kw_only=True)
class GeneratorLimits(QueueLimits):
    """Limits of one decoder's engine."""

    max_waiting_tokens: float = 262_144
    max_prompt_tokens: int = 131_072
    prefix_cache_bytes: int = 0
    unread_s: float = 60.0
    max_aside: int = 256  # largest number of preempted runs that wait for a slot
    max_aside_bytes: int = 256 * 2**20  # most memory for the states of preempted runs; at least as much as all slots' states need is used


class GeneratorEngine(StepEngine[Sequence]):
    """The engine of a decoder: it continues token sequences."""

    limits: GeneratorLimits

    def __init__(
        self,
        session: StepSession[Any],
        vocabulary: Vocabulary,
        *,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars,
        keeper: StateKeeper | None = None,
        shared: SharedPrefixes | None = None,
        limits: GeneratorLimits,
        numerics: str,
        metrics: GeneratorMetrics,
        tracer: "Tracer | None" = None,
    ) -> None:
        """`keeper` loads and stores states. If it is None, requests cannot name states. `shared` finds the states after prompts that other
        processes have fed. `numerics` identifies the arithmetic of this machine (see `states/numerics.py`).
        """
        super().__init__("generator", limits, Admission(limits), provider=session.provider, run_s=1.0, metrics=metrics, tracer=tracer)
        self.numerics = numerics
        self._session = session
        self._states = RunStates(keeper)
        self._intake = Intake(
            session,
            vocabulary,
            grammars,
            eos_token_ids=eos_token_ids,
            max_prompt_tokens=limits.max_prompt_tokens,
            numerics=numerics,
            cancel=self.admission.cancel,
        )
        prefixes = Prefixes(PrefixCache(limits.prefix_cache_bytes), shared, session.fingerprint, metrics)
        state_bytes = session.decoder.state_bytes
        aside_bytes = max(limits.max_aside_bytes, limits.slots * state_bytes)
        most_aside = min(limits.max_aside, aside_bytes // (state_bytes + 4 * session.vocab_size))
        self.workload = self._decoding = Decoding(self, session, limits, states=self._states, prefixes=prefixes, most_aside=most_aside)
        self._prefixes, self._price = prefixes, self._decoding.prefill.price
        self._prompt_work = PromptWork(lambda: self.prompt_token_s, self._unfed)

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    async def _prepare(self, requests: list[GenerationRequest], once: Once) -> None:
        """Do the slow work for requests before they are queued: compile the grammars, which may take seconds, so that `_job` finds them
        compiled, and load the states, checkpoints and shared prefixes from which the runs continue.

        Raises InvalidRequest, Overloaded, StateNotFound, StateGone or StoreFailed.
        """
        if not (first := requests[0]).reopened:
            tokens = sum({id(request.prompt): len(request.prompt) for request in requests}.values())
            with self.offered.refusing(len(requests)):
                self._prompt_work.check(first.client, tokens, first.deadline)
        await self._intake.compile(requests)
        once.states, once.checkpoints = await self._states.load(requests)
        for request in {id(request.prompt): request for request in requests if request.checkpoint not in once.checkpoints}.values():
            await self._prefixes.fetch(request)

    @property
    def prompt_token_s(self) -> float:
        return self._price.token_s

    def _unfed(self) -> list[tuple[GenerationRequest, int]]:
        return [(each.request, each.left_of_prompt) for each in (*self.workload.holders, *self.admission.waiting())]

    @contextmanager
    def expecting(self, client: str, tokens: float, deadline: float) -> Iterator[None]:
        with self.offered.refusing(1), self._prompt_work.expecting(client, tokens, deadline):
            yield

    def _turn_s(self, holders: list[Sequence]) -> float:
        """Estimate how many seconds a run keeps its slot while others wait: one quantum, or until it ends if no run can be preempted."""
        if self.workload.room:
            return min(self._run_s, self._decoding.quantum * step_s) if (step_s := self._decoding.step_s) else self._run_s
        return super()._turn_s(holders)

    def _retry_after_s(self, submission: Submission[Sequence]) -> float:
        return self._run_s / self.limits.slots + self._price.of(submission.tokens)

    def _job(self, request: GenerationRequest, submission: Submission[Sequence], once: Once) -> Sequence:
        self._check_queueable(request)
        self._states.check(request)
        return self._intake.sequence(request, submission, once)

    def finished(self, run: Run, reason: FinishReason | Literal["abort", "error"]) -> None:
        super().finished(run, reason)
        self._states.forget(run.request, erase=reason != "abort")  # another process may continue an aborted run from its checkpoint


def open_decoder(model: DecoderModel, settings: Settings, *, threads: int, store: Store, tracer: "Tracer | None") -> GeneratorEngine:
    """Open the engine of a decoder, and test it."""
    import onnxruntime as ort

    manifest, slots, memory_gib = model.manifest, settings.slots, settings.gpu_memory_gib
    session = open_steps(model.bundle, manifest, threads=threads, provider=settings.provider, slots=slots, gpu_memory_gib=memory_gib)
    golden_logits = check_golden(model.bundle, session, model.encode)
    graph_sha256 = next(file.sha256 for file in manifest.files if file.name == manifest.graph.file)
    numerics = numerics_fingerprint(graph_sha256, ort.__version__, session.provider, golden_logits, SAMPLER_VERSION)
    keeper = StateKeeper(
        store,
        session.decoder,
        vocab_size=session.vocab_size,
        fingerprint=manifest.fingerprint,
        numerics=numerics,
        hot_bytes=settings.hot_state_bytes,
    )
    # A single generator would write states that no other process reads.
    shares = settings.profile == "split" and settings.shared_prefix_bytes and settings.prefix_cache_bytes
    return GeneratorEngine(
        session,
        model.vocabulary,
        eos_token_ids=model.eos_token_ids,
        grammars=Grammars(model.bundle / contract.TOKENIZER, model.eos_token_ids),
        keeper=keeper,
        shared=SharedPrefixes(store, keeper.packing, settings.shared_prefix_bytes) if shares else None,
        numerics=numerics,
        limits=GeneratorLimits(
            slots=slots_within(settings, session.decoder),
            max_prompt_tokens=settings.max_prompt_tokens,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            max_wait_s=settings.max_wait_s,
            max_bulk_wait_s=settings.max_bulk_wait_s,
            hand_over_s=hand_over_s(settings.stream_interval_s),
        ),
        metrics=model.metrics,
        tracer=tracer,
    )


def slots_within(settings: Settings, decoder: contract.Decoder) -> int:
    """Return the number of sequences that a decoder generates at the same time: as many as set, or as `slot_bytes` holds, at least one."""
    return max(1, min(settings.slots, settings.slot_bytes // decoder.state_bytes))
