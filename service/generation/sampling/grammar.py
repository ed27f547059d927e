"""Computes which tokens may come next when the text must match a grammar: a JSON schema, a regular expression or a context-free grammar.

The library is llguidance (github.com/guidance-ai/llguidance): an Earley parser over a lexer of regex derivatives, with masks computed from
a trie of the vocabulary. Grammars are untrusted input: their size, the library's work and its time are bounded, and it runs on a thread
with a large stack, because it is recursive.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from export.contract import BundleError
from service.errors import InvalidRequest, Overloaded
from service.generation.request import Grammar
from service.runtime.lru import Lru

Words = NDArray[np.int32]  # (ceil(V / 32),): bit i of word w is token 32 w + i, 1 = allowed

# Compile time can grow with the square of a source's size or faster: '.*' repeated takes seconds for 4 KB, half a minute for 16 KB.
MAX_SOURCE_BYTES: Final = {"json_schema": 65536, "regex": 4096, "lark": 8192}
MAX_PATTERN_BYTES: Final = 4096  # limit on the total size of all regular expressions in a schema
MAX_MULTIPLE: Final = 10_000  # limit of the least common multiple of all multipleOf in a schema, because each remainder is a lexer state
COMPILE_S: Final = 5.0
MASK_S: Final = 0.001  # allowed seconds of CPU time per mask, on average; most grammars need a tenth
BURST_S: Final = 0.05  # additional seconds of CPU time allowed once per grammar, because each lexer state is built only once
_TRIED = 8  # number of tokens that are fed as a test when a grammar is compiled
_STACK_BYTES = 256 << 20  # the library recurses along chains of rules, with up to 4 KB per level; untouched pages use no memory
_MAX_CACHED = 32
_NAMES: Final = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}

_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=20_000,  # a state takes 1 to 2 KB
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Limits whitespace, because without a limit a model that has nothing more to write fills a run with line breaks.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


class Cost:
    """The CPU time in seconds that one grammar has used, summed over all its runs."""

    def __init__(self) -> None:
        self.spent_s, self.masks = 0.0, 0
        self._lock = threading.Lock()

    def add(self, spent_s: float) -> None:
        with self._lock:
            self.spent_s += spent_s
            self.masks += 1

    @property
    def too_high(self) -> bool:
        """Return whether the grammar costs too much CPU time. Masks are computed on the same cores as the graph."""
        return self.spent_s > BURST_S + MASK_S * self.masks

    def __str__(self) -> str:
        took, most = 1000 * self.spent_s / max(self.masks, 1), 1000 * MASK_S
        return f"it takes {took:.1f} ms a token to follow, and the most is {most:g} ms: simplify it, above all its large repetitions"


class Matcher:
    """The position of one run in its grammar. No method raises: after an error no token is allowed, and `failure` returns the reason."""

    def __init__(self, compiled: LLMatcher, mask_words: int, cost: Cost) -> None:
        self._matcher = compiled
        self._own = np.zeros(mask_words, np.int32)
        self._cost = cost
        self._refused: str | None = None  # why no mask is computed, or None

    def mask(self, out: Words) -> None:
        """Write the mask of the allowed next tokens to `out`. If the text may end here, the end tokens are allowed too."""
        out[:] = 0  # forbids all ids first, including ids that the model has and the tokenizer does not
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
        """Advance by tokens that were drawn. To restore a run's position, pass all tokens of its completion to a new matcher."""
        self._matcher.consume_tokens(list(token_ids))

    @property
    def finished(self) -> bool:
        """Return whether the text matches the grammar and cannot be continued."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """Return why no further token is allowed (a token did not match the grammar, or masks take too much CPU time), or None."""
        if self._matcher.is_error():
            return _reason(self._matcher)
        return self._refused


class Grammars:
    """Compiles grammars for one tokenizer and caches the most recently used ones. Thread-safe."""

    def __init__(self, tokenizer_file: Path, eos_token_ids: tuple[int, ...]) -> None:
        """Raises BundleError if the library cannot read the tokenizer. If `eos_token_ids` is empty, `matcher` raises InvalidRequest for
        every grammar.
        """
        self._tokenizer: LLTokenizer | None = None
        if eos_token_ids:
            try:
                self._tokenizer = LLTokenizer(tokenizer_file.read_text(encoding="utf-8"), eos_token=list(eos_token_ids))
            except ValueError as error:
                raise BundleError(f"{tokenizer_file.name}: not a tokenizer that grammars can be followed with: {error}") from error
        self._compiled: Lru[Grammar, tuple[LLMatcher, Cost]] = Lru(_MAX_CACHED)
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of the grammar. A grammar that is not cached is compiled: usually some ms, COMPILE_S at most.

        Raises InvalidRequest if the source is wrong, too large or too complex, and Overloaded if other grammars are being compiled for
        too long.
        """
        if self._tokenizer is None:
            raise InvalidRequest("this model has no end of text, so no grammar can be followed to its end", param="grammar")
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar, self._tokenizer)
            with self._lock:
                self._compiled.put(grammar, compiled)
        matcher, cost = compiled
        if cost.too_high:
            raise InvalidRequest(f"the {_NAMES[grammar.kind]} cannot be used: {cost}", param="grammar")
        return Matcher(matcher.deep_copy(), _words(self._tokenizer), cost)

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> tuple[LLMatcher, Cost]:
        """Compile one grammar at a time, on a new thread, because it needs a large stack and the library cannot be interrupted."""
        name, source = _NAMES[grammar.kind], _checked(grammar)
        done: list[LLMatcher] = []
        cost = Cost()

        def work() -> None:
            try:
                matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
                first = np.zeros(_words(tokenizer), np.int32)
                Matcher(matcher, _words(tokenizer), Cost()).mask(first)  # some errors in a grammar are raised only by its first mask
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
    """Feed a few allowed tokens, so that a grammar that is expensive from the start is rejected before a run uses it."""
    for _ in range(_TRIED):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return
        matcher.advance(int(allowed[len(allowed) // 2]))
        matcher.mask(mask)


def _started(work: Callable[[], None]) -> threading.Thread:
    """Start a thread with a large stack. A thread started elsewhere at the same moment may get a large stack too, which is harmless."""
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    usual = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


def _checked(grammar: Grammar) -> str:
    """Check the size of the grammar, and return the grammar in the library's own format. Raises InvalidRequest if it is too large."""
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
        # A JSON schema inside a Lark grammar is refused, because it would avoid the checks of schemas below.
        if "%json" in source or source.lstrip().startswith("{"):
            raise InvalidRequest("a Lark grammar may not hold a JSON schema here: send it as one", param="grammar")
        return LLMatcher.grammar_from_lark(source)
    try:
        return LLMatcher.grammar_from_json_schema(_checked_schema(source), defaults={"whitespace_pattern": _WHITESPACE})
    except (ValueError, orjson.JSONEncodeError) as error:  # JSONEncodeError: nested too deeply
        raise InvalidRequest(f"the JSON schema cannot be used: {error}", param="grammar") from error


def _checked_schema(source: str) -> str:
    """Check a JSON schema, and return it serialised again, so that the library and these checks cannot parse it differently."""
    try:
        schema = orjson.loads(source)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}", param="grammar") from error
    _check_references(schema)
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


def _check_references(schema: object) -> None:
    """Raise InvalidRequest if following a `$ref` and the `$ref` at its target, and so on, leads back to the first one."""
    ending: set[str] = set()  # references that lead to something else
    for key, value in _members(schema):
        passed: dict[str, None] = {}
        while key == "$ref" and isinstance(value, str) and value not in ending:
            if value in passed:
                raise InvalidRequest(
                    f"the $ref {value!r:.200} of the JSON schema leads back to itself, so it describes no value: give its target a type",
                    param="grammar",
                )
            passed[value] = None
            target = _target(schema, value)
            value = target.get("$ref") if isinstance(target, dict) else None
        ending.update(passed)


def _target(schema: object, reference: str) -> object:
    """Return the part of the schema at a reference such as `#/$defs/name`, or None if it has another form or leads nowhere."""
    start, *keys = unquote(reference).split("/")
    found = schema if start == "#" else None
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and len(key) < 10 and int(key) < len(found) else None
        else:
            return None
    return found


def _members(value: object) -> Iterator[tuple[str, object]]:
    """Yield every key and value of all nested objects. It does not recurse, because the client chooses the depth."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield from inner.items()
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)


def _reason(matcher: LLMatcher) -> str:
    """Return the library's error message, without its dump of internal state."""
    said = matcher.get_error().split("\n<state>")[0].replace("<non-verbose/>", "").strip().replace("NoExtensionBias", "no text matches it")
    return said if len(said) <= 500 else said[:500] + "…"
