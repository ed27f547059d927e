"""Cases of one test in a loop, which costs less than a test for each of them."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any


def in_one_test(names: str | Sequence[str], values: Iterable[Any], *, ids: Iterable[str] | None = None) -> Callable[[Callable], Callable]:
    """As `pytest.mark.parametrize`, but all cases run in one test, which names every case that fails and has all their errors."""
    names = (names,) if isinstance(names, str) else tuple(names)
    cases = [dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in values]
    labels = [", ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in case.items()) for case in cases]
    labels = labels if ids is None else list(ids)

    def decorate(test: Callable) -> Callable:
        @wraps(test)
        def run_all(**given: Any) -> None:
            failed: dict[str, Exception] = {}
            for label, case in zip(labels, cases, strict=True):
                try:
                    test(**given, **case)
                except Exception as error:
                    failed[f"{label} ({error.message})" if isinstance(error, ExceptionGroup) else label] = error
                    error.add_note(f"in the case {label}")
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(cases)} cases failed: {'; '.join(failed)}", list(failed.values()))

        whole = signature(test)
        run_all.__signature__ = whole.replace(parameters=[each for key, each in whole.parameters.items() if key not in names])
        return run_all

    return decorate
