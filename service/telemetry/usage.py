"""What one run of a generator used, and when."""

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Counts and moments of one run, right at every moment. Moments are `time.monotonic()` seconds."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not computed because a state was at hand
    submitted: float = 0.0
    started: float | None = None  # left the queue
    first_token: float | None = None
    finished: float | None = None
