"""Makes the runs of the engine from requests, after checking that the model can run them."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from service.errors import InputTooLong, InvalidRequest, NotReady
from service.generation.request import GenerationRequest
from service.generation.run import Run
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.sampler import Edits, check_ids, check_sampling
from service.generation.sequence import Sequence
from service.generation.session import StepSession
from service.generation.snapshot import Snapshot, State
from service.generation.step_engine import Once
from service.generation.submission import Submission
from service.generation.text import TextStream, Vocabulary
from service.telemetry.usage import Usage


class Intake:
    """Makes sequences from the requests to one model. Used on the event loop."""

    def __init__(
        self,
        session: StepSession[Any],
        vocabulary: Vocabulary,
        grammars: Grammars,
        *,
        eos_token_ids: tuple[int, ...],
        max_prompt_tokens: int,
        numerics: str,
        cancel: Callable[[Run], None],
    ) -> None:
        """`cancel` is called when a run's caller cancels the run."""
        self._decoder = session.decoder
        self._vocab_size = session.vocab_size
        self._fingerprint = session.fingerprint
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._eos = eos_token_ids
        self._max_prompt_tokens = max_prompt_tokens
        self._numerics = numerics
        self._cancel = cancel
        self._arrivals = 0

    async def compile(self, requests: Iterable[GenerationRequest]) -> None:
        """Compile the grammars of requests on another thread, because compiling may take seconds. `sequence` then finds them compiled."""
        for grammar in {request.grammar for request in requests if request.grammar is not None}:
            await asyncio.to_thread(self._grammars.matcher, grammar)

    def sequence(
        self, request: GenerationRequest, submission: Submission[Sequence], once: Once, snapshot: Snapshot | None = None
    ) -> Sequence:
        """Return a new run of the request, at its beginning or from a snapshot. `once` has the states and checkpoints that were loaded for
        the request. Raises InvalidRequest, InputTooLong or NotReady.
        """
        self._check(request, once.checked)
        completion, state = request.known, None if request.start is None else once.states[request.start]
        if state is not None:
            self._check_start(request, state)
        snapshot = snapshot or once.checkpoints.get(request.checkpoint)
        if snapshot is not None:
            snapshot.check(self._decoder, self._vocab_size, self._fingerprint)
            completion = snapshot.completion
        self._arrivals += 1
        text = TextStream(
            self._vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )
        usage = Usage(len(request.prompt), submitted=submission.submitted)
        seen = None if state is None else state.seen
        sequence = Sequence(
            run=Run(request, usage, self._cancel, None if request.stop else text),
            stops=text if request.stop else None,
            matcher=self._grammars.matcher(request.grammar) if request.grammar is not None else None,
            ends=frozenset((*(() if request.ignore_eos else self._eos), *request.stop_token_ids)),
            order=self._arrivals,
            submission=submission,
            n_positions=self._decoder.n_positions,
            edits=Edits.of(request.sampling, self._vocab_size, request.prompt, completion, once.made, seen),
        )
        sequence.run.numerics = self._numerics
        if state is not None:
            sequence.begin_at(state)
        if snapshot is not None:
            sequence.restore(snapshot)
        elif completion:
            sequence.replay(completion)
        return sequence

    def _check(self, request: GenerationRequest, checked: set[int]) -> None:
        """Raise an error unless this model can run the request. `checked` contains the `id()` of each collection of token ids that was
        checked before.
        """
        size, limit = len(request.prompt), self._max_prompt_tokens
        if size > limit:
            raise InputTooLong(f"the prompt has {size} tokens and the maximum context length is {limit} tokens: shorten it", param="prompt")
        n_positions = self._decoder.n_positions
        if n_positions is not None and size > n_positions:
            said = f"the prompt has {size} tokens, and this model's maximum context length is {n_positions} tokens: shorten it"
            raise InputTooLong(said, param="prompt")
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.stop_token_ids)):
            if id(ids) not in checked:
                check_ids(ids, self._vocab_size, name)
                checked.add(id(ids))
        for name in ("max_tokens", "min_tokens"):
            if (value := getattr(request, name)) < 0:
                raise InvalidRequest(f"{name} is {value} and must be 0 or more", param=name)
        for name in ("top_logprobs", "prompt_logprobs"):
            if (wanted := getattr(request, name)) is not None and not 0 <= wanted <= self._vocab_size:
                raise InvalidRequest(f"{name} is {wanted} and must be from 0 to {self._vocab_size}, the size of the vocabulary", param=name)
        if not all(request.stop):
            raise InvalidRequest("a stop string is empty, and every text ends with it: leave it out", param="stop")
        check_sampling(request.sampling, self._vocab_size, checked)
        check_ids(request.known, self._vocab_size, "known")
        if request.known and request.numerics not in ("", self._numerics):
            raise NotReady("the run was begun by another arithmetic than this generator's: another one must go on with it")

    def _check_start(self, request: GenerationRequest, state: State) -> None:
        """Raise an error unless the request can begin at this state."""
        size, n_positions = len(request.prompt) + state.position, self._decoder.n_positions
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
