"""One run inside the engine: how far it is, and what of its text may leave."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

from service.errors import InvalidRequest
from service.generation.request import Delta, FinishReason, GenerationRequest, Token, TokenLogprob
from service.generation.run import Run
from service.generation.sampling.grammar import Matcher, Words
from service.generation.sampling.sampler import Edits
from service.generation.session import Logits
from service.generation.snapshot import Snapshot, State
from service.generation.submission import Submission
from service.generation.text import TextStream


@dataclass(eq=False)
class Sequence:
    """A run that the engine works on. Used by the engine's thread alone."""

    run: Run
    stops: TextStream | None  # the text, if stop strings may end it; otherwise the reader of the run makes it
    matcher: Matcher | None
    ends: frozenset[int]  # token ids that end it
    order: int  # of arrival
    submission: "Submission[Sequence]"
    n_positions: int | None = None  # tokens that the model has positions for; None: any number
    edits: Edits | None = None  # changes to its logits
    start: int = 0  # the position of its state when its prompt began
    position: int = 0  # tokens that its state has seen
    fed: int = 0  # tokens of its prompt that its state has seen
    placed_at: int = 0  # the position at which it got its slot
    aside: bool = False  # it had a slot, gave it back, and waits for another
    state: State | None = None  # while it is in no row and in no prompt of the prefill; None: that of an empty sequence
    before: Logits | None = None  # (V,) of the next prompt token, if it was restored with log-probabilities to come
    mask: Future[Words] | None = None  # the grammar's next tokens; None: no grammar, or no slot yet
    drew: float = 0.0  # when it last drew a token before that, by the engine's clock
    completion: list[int] = field(default_factory=list)
    request: GenerationRequest = field(init=False)
    slots: ClassVar = 1

    def __post_init__(self) -> None:
        self.request = self.run.request

    @property
    def runs(self) -> tuple[Run]:
        return (self.run,)

    @property
    def most(self) -> int:
        """Tokens that may be drawn. The last of them is not fed, and so needs no position."""
        asked = self.request.max_tokens
        return asked if self.n_positions is None else min(asked, self.n_positions - self.start - len(self.request.prompt) + 1)

    @property
    def left_of_prompt(self) -> int:
        return len(self.request.prompt) - self.fed

    @property
    def gone_on(self) -> int:
        """Tokens that its state has seen since it got its slot."""
        return self.position - self.placed_at

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that must not come yet."""
        return tuple(self.ends) if len(self.completion) < self.request.min_tokens else ()

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> Token | Delta:
        """The token was drawn: what may be said now."""
        self.completion.append(token_id)
        if token_id in self.ends:
            by_id = token_id in self.request.stop_token_ids
            held = "" if self.stops is None else self.stops.finish()
            return Delta(held, (token_id,), () if logprob is None else (logprob,), "stop", token_id if by_id else None)
        finish: FinishReason | None = None
        if self.matcher is not None and _complete(self.matcher, token_id):
            finish = "stop"
        elif len(self.completion) >= self.most:
            finish = "length"
        return Token(token_id, logprob, finish) if self.stops is None else self._watched(self.stops, Token(token_id, logprob, finish))

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of a run, without sending its tokens again. Raises InvalidRequest if the run had ended."""
        self.start, self.position, self.fed = snapshot.start, snapshot.state.position, snapshot.fed
        for token_id in snapshot.completion:
            if self.accept(token_id, None).finish_reason is not None:
                raise InvalidRequest("the run has ended: there is nothing to go on with")
        self.run.said(snapshot.completion)
        self.run.prompt_logprobs.extend(snapshot.prompt_logprobs)
        self.state, self.before = snapshot.state, snapshot.before
        self.run.usage.completion_tokens = len(snapshot.completion)

    def _watched(self, stops: TextStream, token: Token) -> Delta:
        """The token's text, as far as it may leave; a stop string ends the run."""
        token_id, logprob, finish = token
        text = stops.push(token_id, may_stop=len(self.completion) > self.request.min_tokens)
        if stops.stopped is not None:
            finish = "stop"
        elif finish is not None:
            text += stops.finish()
        return Delta(text, (token_id,), () if logprob is None else (logprob,), finish, stops.stopped)


def _complete(matcher: Matcher, token_id: int) -> bool:
    """The grammar has had this token, and takes no other."""
    matcher.advance(token_id)
    return matcher.finished
