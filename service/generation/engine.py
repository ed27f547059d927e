"""A decoder's engine. It alternates between a decode step for all running sequences and a chunk of prefill.

`step_engine.py` has the loop, and `decoding.py` what it computes. This file has what a decoder's engine does on the event loop: it checks
requests, makes their runs, and opens the engine.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from export import contract
from service.errors import InputTooLong, InvalidRequest, NotReady
from service.generation.admission import Admission, QueueLimits
from service.generation.decoding import Decoding
from service.generation.gpu.session import open_steps
from service.generation.intake import PromptWork
from service.generation.model import DecoderModel
from service.generation.request import FinishReason, GenerationRequest
from service.generation.run import Run
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.sampler import SAMPLER_VERSION, Edits, check_ids, check_sampling
from service.generation.saved.keeper import StateKeeper
from service.generation.saved.prefix_cache import PrefixCache
from service.generation.saved.prefixes import Prefixes
from service.generation.saved.shared_prefixes import SharedPrefixes
from service.generation.selftest import check_golden
from service.generation.sequence import Sequence
from service.generation.session import StepSession
from service.generation.state import State
from service.generation.step_engine import Once, StepEngine
from service.generation.submission import Submission
from service.generation.text import TextStream, Vocabulary
from service.runtime.pacing import hand_over_s
from service.settings import Settings
from service.states.numerics import numerics_fingerprint
from service.states.store import Store
from service.telemetry.metrics import GeneratorMetrics
from service.telemetry.usage import Usage

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
        self._session, self._vocabulary, self._grammars, self._keeper = session, vocabulary, grammars, keeper
        self._eos = eos_token_ids
        self._arrivals = 0
        self._prefixes = Prefixes(PrefixCache(limits.prefix_cache_bytes), shared, session.fingerprint, metrics)
        state_bytes = session.decoder.state_bytes
        aside_bytes = max(limits.max_aside_bytes, limits.slots * state_bytes)
        most_aside = min(limits.max_aside, aside_bytes // (state_bytes + 4 * session.vocab_size))
        self.workload = self._decoding = Decoding(self, session, limits, keeper=keeper, prefixes=self._prefixes, most_aside=most_aside)
        self._price = self._decoding.prefill.price
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
        for grammar in {request.grammar for request in requests if request.grammar is not None}:
            await asyncio.to_thread(self._grammars.matcher, grammar)
        if self._keeper is not None:
            once.states, once.checkpoints = await self._keeper.load(requests)
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
        """Return a new run of the request, at its beginning or from its checkpoint. `once` has the states and checkpoints that were loaded
        for the request. Raises InvalidRequest, InputTooLong or NotReady.
        """
        self._check_queueable(request)
        self._check(request, once.checked)
        state = None if request.start is None else once.states[request.start]
        if state is not None:
            self._check_start(request, state)
        decoder, vocab_size = self._session.decoder, self._session.vocab_size
        if (checkpoint := once.checkpoints.get(request.checkpoint)) is not None:
            checkpoint.check(decoder, vocab_size, self._session.fingerprint)
        self._arrivals += 1
        text = TextStream(
            self._vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        usage = Usage(len(request.prompt), submitted=submission.submitted)
        seen = None if state is None else state.seen
        sequence = Sequence(
            run=Run(request, usage, self.admission.cancel, None if request.stop else text),
            stops=text if request.stop else None,
            matcher=self._grammars.matcher(request.grammar) if request.grammar is not None else None,
            ends=frozenset((*(() if request.ignore_eos else self._eos), *request.stop_token_ids)),
            order=self._arrivals,
            submission=submission,
            n_positions=decoder.n_positions,
            edits=Edits.of(request.sampling, vocab_size, request.prompt, request.known, once.made, seen),
        )
        sequence.run.numerics = self.numerics
        if state is not None:
            sequence.begin_at(state)
        if checkpoint is not None:
            sequence.restore(checkpoint)
        if request.known:
            sequence.replay(request.known)
        return sequence

    def _check(self, request: GenerationRequest, checked: set[int]) -> None:
        """Raise an error unless this model can run the request. `checked` contains the `id()` of each collection of token ids that was
        checked before.
        """
        if self._keeper is None and (request.start is not None or request.keep is not None):
            raise InvalidRequest("this engine has no store of states: leave out `state` and `store_state`", param="state")
        size, limit, vocab_size = len(request.prompt), self.limits.max_prompt_tokens, self._session.vocab_size
        if size > limit:
            raise InputTooLong(f"the prompt has {size} tokens and the maximum context length is {limit} tokens: shorten it", param="prompt")
        n_positions = self._session.decoder.n_positions
        if n_positions is not None and size > n_positions:
            said = f"the prompt has {size} tokens, and this model's maximum context length is {n_positions} tokens: shorten it"
            raise InputTooLong(said, param="prompt")
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.stop_token_ids)):
            if id(ids) not in checked:
                check_ids(ids, vocab_size, name)
                checked.add(id(ids))
        for name in ("max_tokens", "min_tokens"):
            if (value := getattr(request, name)) < 0:
                raise InvalidRequest(f"{name} is {value} and must be 0 or more", param=name)
        for name in ("top_logprobs", "prompt_logprobs"):
            if (wanted := getattr(request, name)) is not None and not 0 <= wanted <= vocab_size:
                raise InvalidRequest(f"{name} is {wanted} and must be from 0 to {vocab_size}, the size of the vocabulary", param=name)
        if not all(request.stop):
            raise InvalidRequest("a stop string is empty, and every text ends with it: leave it out", param="stop")
        check_sampling(request.sampling, vocab_size, checked)
        check_ids(request.known, vocab_size, "known")
        if request.known and request.numerics not in ("", self.numerics):
            raise NotReady("the run was begun by another arithmetic than this generator's: another one must go on with it")

    def _check_start(self, request: GenerationRequest, state: State) -> None:
        """Raise an error unless the request can begin at this state."""
        size, n_positions = len(request.prompt) + state.position, self._session.decoder.n_positions
        if n_positions is not None and size > n_positions:
            raise InputTooLong(
                f"the state has seen {state.position} tokens and the prompt has {len(request.prompt)} more, and this model's "
                f"maximum context length is {n_positions} tokens: shorten the prompt",
                param="prompt",
            )
        if not request.prompt and not request.max_tokens:
            raise InvalidRequest("the prompt has no tokens and max_tokens is 0: fork the state to get a copy of it", param="prompt")
        if not request.prompt and state.logits is None:
            raise InvalidRequest("the prompt has no tokens, and the state has no logits to draw from: send a token", param="prompt")

    def finished(self, run: Run, reason: FinishReason | Literal["abort", "error"]) -> None:
        super().finished(run, reason)
        if self._keeper is not None:
            self._keeper.forget(run.request, erase=reason != "abort")  # another process may continue an aborted run from its checkpoint


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
