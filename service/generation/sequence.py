"""One run inside the engine: its progress, and the part of its text that can be sent."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import ClassVar

from service.errors import InvalidRequest
from service.generation.request import Delta, FinishReason, GenerationRequest, Token, TokenLogprob
from service.generation.run import Run
from service.generation.sampling.grammar import Matcher, Words
from service.generation.sampling.guesses import Guesses
from service.generation.sampling.sampler import Edits
from service.generation.session import Logits
from service.generation.state import State
from service.generation.submission import Submission
from service.generation.text import TextStream

CHECKPOINT_TOKENS = 256  # tokens between two checkpoints; their cost and their benefit are measured in docs/decisions.md
PROMPT_CHECKPOINT_TOKENS = 1_024  # tokens between two checkpoints in a prompt, whose tokens are fed faster than tokens are drawn


@dataclass(eq=False)
class Sequence:
    """A run inside the engine. Only the engine's thread uses it."""

    run: Run
    stops: TextStream | None  # decodes the text if a stop string may end it; None: the run's reader decodes it
    matcher: Matcher | None
    ends: frozenset[int]  # token ids that end the run
    order: int  # number in the order of arrival
    submission: "Submission[Sequence]"
    n_positions: int | None = None  # maximum number of positions of the model; None: unlimited
    edits: Edits | None = None  # changes to the run's logits at every step, or None
    start: int = 0  # position of the state to which the prompt is fed
    position: int = 0  # number of tokens fed to the run's state, including the `start` tokens before the prompt
    fed: int = 0  # how many of `tokens` were fed to the run's state
    tokens: tuple[int, ...] = ()  # the run's prompt, and the tokens that were drawn before the run was restored
    origin: State | None = None  # the state that the request continues; None: the empty state
    base: State | None = None  # the state at which this engine began to feed tokens: `origin`, or a checkpoint
    # The last delta of a run that draws no more tokens, because only its state is wanted. Such a run has at least one token to feed.
    over: Delta | None = None
    marked: State | None = None  # the state of the newest checkpoint, without tensors; `origin` before the first one
    shared: int = 0  # the store has the state after this number of first tokens, for other processes; 0: none
    saved_at: int = 0  # position of the run's newest checkpoint
    placed_at: int = 0  # position when the run got its slot
    aside: bool = False  # whether the run was preempted and waits for a slot
    state: State | None = None  # the run's state while it has no row and is not in prefill; None: the empty state
    # (V,) logits of the next prompt token. Set if the prompt's log-probabilities were requested and the run begins at a state.
    before: Logits | None = None
    mask: Future[Words] | None = None  # mask of the next token; None: no grammar, or no slot yet
    drew: float = 0.0  # time at which the run drew its previous token, in seconds of the engine's clock
    guesses: Guesses | None = None  # guesses the next tokens; None: no tokens are guessed, or the run has not drawn yet
    completion: list[int] = field(default_factory=list)
    request: GenerationRequest = field(init=False)
    slots: ClassVar = 1

    def __post_init__(self) -> None:
        self.request = self.run.request
        self.tokens = self.request.prompt
        if not self.request.max_tokens:
            self.over = Delta("", finish_reason="length")

    @property
    def runs(self) -> tuple[Run]:
        return (self.run,)

    @property
    def most(self) -> int:
        """Return the largest number of tokens that may be drawn. The last token needs a position only if it is fed, which is done only if
        the state is kept.
        """
        asked = self.request.max_tokens
        if self.n_positions is None:
            return asked
        return min(asked, self.n_positions - self.start - len(self.request.prompt) + (self.request.keep is None))

    @property
    def left_of_prompt(self) -> int:
        """Return the number of tokens to feed before the run's next token is drawn."""
        return len(self.tokens) - self.fed

    @property
    def is_checkpoint_due(self) -> bool:
        """Return whether to write a checkpoint. A run that draws no more tokens gets none after its last token, because a run that
        continued from it would have no token to feed.
        """
        if not self.request.checkpoint or (self.over is not None and not self.left_of_prompt):
            return False
        return self.position - self.saved_at >= (PROMPT_CHECKPOINT_TOKENS if self.left_of_prompt else CHECKPOINT_TOKENS)

    @property
    def gone_on(self) -> int:
        """Return the number of tokens fed to the run's state since the run got its slot."""
        return self.position - self.placed_at

    @property
    def banned(self) -> tuple[int, ...]:
        """Return the token ids that may not be drawn now: the end tokens, until `min_tokens` were drawn."""
        return tuple(self.ends) if len(self.completion) < self.request.min_tokens else ()

    def fed_since(self, marked: State | None) -> tuple[int, ...]:
        """Return the tokens that were fed to the run's state after its earlier state `marked`, or all fed tokens if `marked` is None."""
        first, n, prompt = 0 if marked is None else marked.position - self.start, self.position - self.start, self.request.prompt
        return prompt[first:n] + tuple(self.completion[max(first - len(prompt), 0) : max(n - len(prompt), 0)])

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> Token | Delta:
        """Append a drawn token, and return what can be sent now: a token, or a delta if the engine decodes the text."""
        self.completion.append(token_id)
        if self.guesses is not None:
            self.guesses.add(token_id)
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

    def feed_last(self, last: Delta) -> None:
        """Draw no more tokens. The last one is fed like a prompt, because the state after it is kept, and then `last` is emitted."""
        self.over = last
        self.tokens = self.request.prompt + tuple(self.completion)
        self.fed = len(self.tokens) - 1
        self.request = replace(self.request, prompt_logprobs=None)  # those of the prompt have been computed

    def begin_at(self, state: State) -> None:
        """Begin at the state of earlier tokens instead of the empty state."""
        self.origin = self.base = self.state = self.marked = state
        self.start = self.position = self.saved_at = state.position
        if self.request.prompt_logprobs is not None:
            self.before = state.logits

    def restore(self, checkpoint: State) -> None:
        """Continue from the state of the run at a checkpoint."""
        self.position, self.fed = checkpoint.position, checkpoint.position - self.start
        self.base = self.state = checkpoint
        self.saved_at = self.position
        if checkpoint.seen is not None:
            self.marked = checkpoint

    def replay(self, completion: tuple[int, ...]) -> None:
        """Treat these tokens as drawn before. The tokens that were not fed to the run's state yet are fed like a prompt.

        Raises InvalidRequest if one of these tokens ended the run. But if the last token ended it and the request keeps the state, the run
        continues until its state is stored.
        """
        for at, token_id in enumerate(completion, 1):
            if (made := self.accept(token_id, None)).finish_reason is not None:
                if at < len(completion) or self.request.keep is None:
                    raise InvalidRequest("the run has ended: there is nothing to go on with")
                self.over = made.last()
        self.tokens = self.request.prompt + completion
        ended_by_id = self.over is not None and bool(completion) and completion[-1] in self.ends
        self.run.said(completion[:-1] if ended_by_id else completion)  # a token that ends a run has no text
        self.run.usage.completion_tokens = len(completion)

    def _watched(self, stops: TextStream, token: Token) -> Delta:
        """Return the text that can be sent after this token. A stop string ends the run."""
        token_id, logprob, finish = token
        text = stops.push(token_id, may_stop=len(self.completion) > self.request.min_tokens)
        if stops.stopped is not None:
            finish = "stop"
        elif finish is not None:
            text += stops.finish()
        return Delta(text, (token_id,), () if logprob is None else (logprob,), finish, stops.stopped)


def _complete(matcher: Matcher, token_id: int) -> bool:
    """Advance the grammar by this token, and return whether the text is complete."""
    matcher.advance(token_id)
    return matcher.finished
