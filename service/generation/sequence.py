"""One run inside the engine: how far it is, and what of its text may leave."""

from dataclasses import dataclass, field

from service.errors import InvalidRequest
from service.generation.condition import Condition
from service.generation.grammar import Matcher
from service.generation.request import Delta, FinishReason, GenerationRequest, TokenLogprob
from service.generation.run import Run
from service.generation.text import TextStream


@dataclass(eq=False)
class Sequence:
    """A run that the engine works on. Used by the engine's thread alone."""

    run: Run
    text: TextStream
    matcher: Matcher | None
    ends: frozenset[int]  # token ids that end it
    order: int  # of arrival
    come_from: Condition | None = None  # what it goes on from, until it has a slot
    position: int = 0  # tokens that its state has seen
    completion: list[int] = field(default_factory=list)
    last_token: float = 0.0  # when it was drawn, time.monotonic()
    request: GenerationRequest = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.run.request

    @property
    def left_of_prompt(self) -> int:
        return len(self.request.prompt) - self.position

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that must not come yet."""
        return tuple(self.ends) if len(self.completion) < self.request.min_tokens else ()

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> Delta:
        """The token was drawn: what may be said now."""
        request = self.request
        self.completion.append(token_id)
        logprobs = () if logprob is None else (logprob,)
        if token_id in self.ends:
            by_id = token_id in request.stop_token_ids
            return Delta(self.text.finish(), (token_id,), logprobs, "stop", token_id if by_id else None)
        text = self.text.push(token_id, may_stop=len(self.completion) > request.min_tokens)
        finish: FinishReason | None = None
        if self.text.stopped is not None:
            finish = "stop"
        elif self._complete(token_id):
            finish, text = "stop", text + self.text.finish()
        elif len(self.completion) >= request.max_tokens:
            finish, text = "length", text + self.text.finish()
        return Delta(text, (token_id,), logprobs, finish, self.text.stopped)

    def go_on_from(self, condition: Condition) -> None:
        """Stand where that run stood, with nothing said again. InvalidRequest where it had come to its end."""
        for token_id in condition.completion:
            if self.accept(token_id, None).finish_reason is not None:
                raise InvalidRequest("the run has ended: there is nothing to go on with")
        self.come_from = condition
        self.run.usage.completion_tokens = len(condition.completion)

    def _complete(self, token_id: int) -> bool:
        """The grammar has had this token, and takes no other."""
        if self.matcher is None:
            return False
        self.matcher.advance(token_id)
        return self.matcher.finished
