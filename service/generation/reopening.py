"""Opens the runs of a request again in another process, after the process that computed them was lost. Runs go on with the next token if
their engine can do so, else they begin again.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from service.errors import NotReady, Overloaded
from service.generation.model import Generating
from service.generation.request import Delta, GenerationRequest
from service.generation.run import Run

_FRUITLESS = 2  # attempts in a row without a new token; after them the run fails, because the request itself may crash the processes
_PATIENCE_S = 30.0  # longest time for all attempts; a process that is started again is ready after 3 to 9 s
_PAUSES_S = (0.05, 1.0)  # shortest and longest wait between two attempts, in seconds


@dataclass
class _Progress:
    """The tokens and characters that the reader of one run has received, and how many of them a run that began again has yet to repeat."""

    token_ids: list[int] = field(default_factory=list)
    characters: int = 0
    ended: bool = False
    again_ids: int = 0
    again_characters: int = 0


class Reopening:
    """Opens lost runs again. It stores the requests of the runs and how much of each run was read. A request has `outputs` runs."""

    def __init__(self, engine: Generating, requests: Sequence[GenerationRequest], session: str) -> None:
        self._engine = engine
        self._requests = requests
        self._session = session
        self._progress = [_Progress() for request in requests for _ in range(request.outputs)]
        self._attempts = 0  # attempts since the last new token

    def may(self, error: Exception | None) -> bool:
        """Return whether runs that ended with this error can be opened again."""
        return isinstance(error, NotReady) and error.elsewhere and self._attempts < _FRUITLESS

    def new(self, at: int, delta: Delta) -> Delta | None:
        """Note that `delta` was read from run `at`. Returns the part of the delta that the run's reader has not received yet, or None."""
        progress = self._progress[at]
        if progress.again_ids or progress.again_characters:
            n, n_characters = progress.again_ids, progress.again_characters
            progress.again_ids = max(n - len(delta.token_ids), 0)
            progress.again_characters = max(n_characters - len(delta.text), 0)
            delta = delta._replace(text=delta.text[n_characters:], token_ids=delta.token_ids[n:], logprobs=delta.logprobs[n:])
            if not (delta.text or delta.token_ids or delta.finish_reason):
                return None
        progress.token_ids += delta.token_ids
        progress.characters += len(delta.text)
        progress.ended = delta.finish_reason is not None
        self._attempts = 0
        return delta

    async def open(self, runs: list[Run]) -> None:
        """Replace the unfinished runs in `runs` by newly opened runs. If all attempts fail, raises the error of the last attempt."""
        self._attempts += 1
        wanted, places = self._unfinished(runs)
        patience = min(time.monotonic() + _PATIENCE_S, *(request.deadline for request in wanted))
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                opened = await self._engine.open(wanted, self._session)
                break
            except (NotReady, Overloaded) as error:
                if isinstance(error, NotReady) and error.elsewhere:  # another process was lost during this attempt
                    self._attempts += 1
                if self._attempts > _FRUITLESS or time.monotonic() + pause_s > patience:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        for at, run in zip(places, opened, strict=True):
            if self._progress[at].ended:
                run.cancel()
                continue
            if run.request.known:
                run.prompt_logprobs = runs[at].prompt_logprobs
            run.most_unread = runs[at].most_unread
            runs[at] = run

    def _unfinished(self, runs: Sequence[Run]) -> tuple[list[GenerationRequest], list[int]]:
        """Return the requests that have unfinished runs, and the indices of their runs."""
        wanted: list[GenerationRequest] = []
        places: list[int] = []
        first = 0
        for request in self._requests:
            outputs = range(first, first + request.outputs)
            first += request.outputs
            if all(self._progress[at].ended for at in outputs):
                continue
            places += outputs
            if request.takes_known:
                wanted.append(self._going_on(request, runs[outputs[0]], self._progress[outputs[0]]))
            else:
                wanted.append(request)
                for progress in (self._progress[at] for at in outputs):
                    progress.again_ids, progress.again_characters = len(progress.token_ids), progress.characters
        return wanted, places

    def _going_on(self, request: GenerationRequest, run: Run, progress: _Progress) -> GenerationRequest:
        request = replace(request, known=request.known + tuple(progress.token_ids), numerics=run.numerics, reopened=True)
        return replace(request, prompt_logprobs=None) if progress.token_ids else request
