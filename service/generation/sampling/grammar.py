"""Which tokens may come next, where the text must belong to a language: JSON of a schema, a regular expression, a context-free grammar.

The library is llguidance (github.com/guidance-ai/llguidance): an Earley parser over a lexer of regex derivatives, and masks from a trie
of the vocabulary. No input is trusted: the source, the library's work and the time are bounded, and its recursion has a stack of its
own.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from export.contract import BundleError
from service.errors import InvalidRequest, Overloaded
from service.generation.request import Grammar

Words = NDArray[np.int32]  # (ceil(V / 32),): bit i of word w is token 32 w + i, 1 = allowed

# The library's work can grow with the square of a source or faster: '.*' repeated for 4 KB takes seconds, for 16 KB half a minute.
MAX_SOURCE_BYTES: Final = {"json_schema": 65536, "regex": 4096, "lark": 8192}
MAX_PATTERN_BYTES: Final = 4096  # of all regular expressions of a schema together
MAX_MULTIPLE: Final = 10_000  # the least common multiple of a schema's multipleOf: the library makes a state for each remainder
COMPILE_S: Final = 5.0
MASK_S: Final = 0.001  # of CPU for a mask, on average; a tenth of it is usual
BURST_S: Final = 0.05  # allowed on top of that, once for all masks, since each state of the lexer is made only once
_TRIED = 8  # tokens that are tried when a grammar is compiled
_STACK_BYTES = 256 << 20  # it recurses along chains of rules, 4 KB or less a link; a page that is not touched costs nothing
_MAX_CACHED = 32
_NAMES: Final = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}

_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=20_000,  # 1 to 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Without an end to it, a model that has nothing to say fills a run with line breaks.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


class Cost:
    """The CPU time that one grammar has taken, over all its runs."""

    def __init__(self) -> None:
        self.spent_s, self.masks = 0.0, 0
        self._lock = threading.Lock()

    def add(self, spent_s: float) -> None:
        with self._lock:
            self.spent_s += spent_s
            self.masks += 1

    @property
    def too_high(self) -> bool:
        """Whether the grammar is too expensive. Masks are computed on the cores that run the graph."""
        return self.spent_s > BURST_S + MASK_S * self.masks

    def __str__(self) -> str:
        took, most = 1000 * self.spent_s / max(self.masks, 1), 1000 * MASK_S
        return f"it takes {took:.1f} ms a token to follow, and the most is {most:g} ms: simplify it, above all its large repetitions"


class Matcher:
    """The position of one run in its grammar. Its methods do not raise: a failed matcher allows no token, and `failure` has the reason."""

    def __init__(self, compiled: LLMatcher, mask_words: int, cost: Cost) -> None:
        self._matcher = compiled
        self._own = np.zeros(mask_words, np.int32)
        self._cost = cost
        self._refused: str | None = None  # why no mask was computed

    def mask(self, out: Words) -> None:
        """Fills the words with what may come next: an end of text where the language allows one."""
        out[:] = 0  # ids that the model has and the tokenizer has not
        if self._cost.too_high:
            self._refused = str(self._cost)
            return
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._own.ctypes.data, self._own.nbytes)
        self._cost.add(time.thread_time() - began)
        if not self._matcher.is_error():
            shared = min(len(out), len(self._own))
            out[:shared] = self._own[:shared]

    def advance(self, *token_ids: int) -> None:
        """These tokens came next. The tokens of a whole completion bring a fresh matcher to where the first one was."""
        self._matcher.consume_tokens(list(token_ids))

    @property
    def finished(self) -> bool:
        """The text belongs to the language, and nothing can be added to it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """Why no token is allowed any more: one came that does not belong here, or the grammar is too complex to follow."""
        if self._matcher.is_error():
            return _reason(self._matcher)
        return self._refused


class Grammars:
    """Compiles grammars for one tokenizer and keeps the last few. Thread-safe."""

    def __init__(self, tokenizer_file: Path, eos_token_ids: tuple[int, ...]) -> None:
        """BundleError if the library cannot read the tokenizer. A model without an end of text has no grammars: each is refused."""
        self._tokenizer: LLTokenizer | None = None
        if eos_token_ids:
            try:
                self._tokenizer = LLTokenizer(tokenizer_file.read_text(encoding="utf-8"), eos_token=list(eos_token_ids))
            except ValueError as error:
                raise BundleError(f"{tokenizer_file.name}: not a tokenizer that grammars can be followed with: {error}") from error
        self._compiled: OrderedDict[Grammar, tuple[LLMatcher, Cost]] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of the language. InvalidRequest for a source that is wrong, too large or too complex, Overloaded while others
        are being compiled.

        A grammar that is not known yet is compiled, for milliseconds as a rule and COMPILE_S at most.
        """
        if self._tokenizer is None:
            raise InvalidRequest("this model has no end of text, so no grammar can be followed to its end", param="grammar")
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar, self._tokenizer)
            with self._lock:
                self._compiled[grammar] = compiled
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
        matcher, cost = compiled
        if cost.too_high:
            raise InvalidRequest(f"the {_NAMES[grammar.kind]} cannot be used: {cost}", param="grammar")
        return Matcher(matcher.deep_copy(), _words(self._tokenizer), cost)

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> tuple[LLMatcher, Cost]:
        """Compile one grammar at a time, each on a thread of its own: for its stack, and because the library cannot be interrupted."""
        name, source = _NAMES[grammar.kind], _checked(grammar)
        done: list[LLMatcher] = []
        cost = Cost()

        def work() -> None:
            try:
                matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
                first = np.zeros(_words(tokenizer), np.int32)
                Matcher(matcher, _words(tokenizer), Cost()).mask(first)  # some errors appear only here
                if not matcher.is_error():
                    _try(Matcher(matcher.deep_copy(), _words(tokenizer), cost), first)
                done.append(matcher)
            finally:
                self._compiling.release()

        if not self._compiling.acquire(timeout=COMPILE_S):
            raise Overloaded("the grammars that came before are still being compiled", retry_after_s=COMPILE_S)
        try:
            thread = _started(work)
        except RuntimeError:
            self._compiling.release()
            raise
        thread.join(COMPILE_S)
        if not done:
            raise InvalidRequest(f"the {name} took more than {COMPILE_S:g} s to compile: simplify it", param="grammar")
        if done[0].is_error():
            raise InvalidRequest(f"the {name} cannot be used: {_reason(done[0])}", param="grammar")
        return done[0], cost


def _words(tokenizer: LLTokenizer) -> int:
    return -(-int(tokenizer.vocab_size) // 32)


def _try(matcher: Matcher, mask: Words) -> None:
    """Follow a few tokens, so that a grammar that is expensive from the start is refused before a run waits for it."""
    for _ in range(_TRIED):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return
        matcher.advance(int(allowed[len(allowed) // 2]))
        matcher.mask(mask)


def _started(work: Callable[[], None]) -> threading.Thread:
    """A thread with a large stack. A thread that another one starts in the same moment may get one too, which costs it nothing."""
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    usual = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


def _checked(grammar: Grammar) -> str:
    """The grammar in the library's own form, once it is known to be of a size that can be compiled."""
    name, source = _NAMES[grammar.kind], grammar.source
    try:
        size, limit = len(source.encode()), MAX_SOURCE_BYTES[grammar.kind]
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the {name} has half a surrogate pair at {error.start}, which is no character", param="grammar") from error
    if size > limit:
        raise InvalidRequest(f"the {name} has {size} bytes and the most is {limit}", param="grammar")
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if grammar.kind == "lark":
        # Both would bring a schema past the checks below.
        if "%json" in source or source.lstrip().startswith("{"):
            raise InvalidRequest("a Lark grammar may not hold a JSON schema here: send it as one", param="grammar")
        return LLMatcher.grammar_from_lark(source)
    try:
        return LLMatcher.grammar_from_json_schema(_checked_schema(source), defaults={"whitespace_pattern": _WHITESPACE})
    except (ValueError, orjson.JSONEncodeError) as error:  # the second: nested too deeply
        raise InvalidRequest(f"the JSON schema cannot be used: {error}", param="grammar") from error


def _checked_schema(source: str) -> str:
    """The schema as it was read here, so that the library cannot read another one."""
    try:
        schema = orjson.loads(source)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}", param="grammar") from error
    pattern_bytes, multiple = 0, 1
    for key, value in _members(schema):
        if key == "x-guidance":
            raise InvalidRequest("the JSON schema may not set options of the library (x-guidance) here", param="grammar")
        if key == "pattern" and isinstance(value, str):
            pattern_bytes += len(value.encode())
        elif key == "patternProperties" and isinstance(value, dict):
            pattern_bytes += sum(len(pattern.encode()) for pattern in value)
        elif key == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            multiple = math.lcm(multiple, Fraction(str(value)).numerator)
    if pattern_bytes > MAX_PATTERN_BYTES:
        raise InvalidRequest(
            f"the patterns of the JSON schema have {pattern_bytes} bytes and the most is {MAX_PATTERN_BYTES}", param="grammar"
        )
    if multiple > MAX_MULTIPLE:
        raise InvalidRequest(
            f"the multipleOf of the JSON schema have the least common multiple {multiple} and the most is {MAX_MULTIPLE}", param="grammar"
        )
    return orjson.dumps(schema).decode()


def _members(value: object) -> Iterator[tuple[str, object]]:
    """Every key and value of every object inside, however deep: without recursion, since the depth is the sender's."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield from inner.items()
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)


def _reason(matcher: LLMatcher) -> str:
    """The library's error message, without a dump of its state."""
    said = matcher.get_error().split("\n<state>")[0].replace("<non-verbose/>", "").strip()
    return said if len(said) <= 500 else said[:500] + "…"
