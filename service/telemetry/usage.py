"""Tokens and timestamps of one run of a generator."""

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Token counts and timestamps of one run, kept up to date. Timestamps are `time.monotonic()` seconds."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed, because the state after them was cached
    submitted: float = 0.0
    started: float | None = None  # time when the run left the queue
    first_token: float | None = None
    finished: float | None = None
