"""Opens a bundle's tokenizer. The file comes from a checkpoint, so it is refused if tokenising some text could take too long.

The `tokenizers` library matches regular expressions with Oniguruma, which backtracks. After ten million steps it panics, with an error that
is not an `Exception`. A pattern that could need so many steps is recognised by its form, and refused. Such patterns have a repeated group
that contains alternatives, several consecutive unbounded repetitions, or many consecutive alternatives. No published tokenizer has
such a pattern.
"""

import json
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from export import contract
from service.errors import TokenizationFailed
from service.runtime.onnx import in_a_line

MOST_OPEN = 3  # largest allowed number of consecutive unbounded repetitions, such as `*`
# Most unbounded repetitions before a part that may fail to match, because each multiplies the cost by the length of the text.
MOST_FAILING = 1
MOST_WAYS = 1_000  # most ways to match at one position, because all are tried if the rest of the pattern does not match
LARGE_REPEAT = 32  # a repetition with a higher maximum counts as unbounded
# The most characters that each part of the tokenizer may make from one, because a normalizer uses 17 bytes of memory per character.
MOST_GROWTH = {"normalizer": 16, "pre_tokenizer": 16, "post_processor": 16, "decoder": 4}
MOST_ADDED = 1_000  # most special tokens that a template may add to a text
MOST_ADDED_TOKENS = 16_384  # most tokens beside the vocabulary: opening takes 50 us for each. Published tokenizers have up to 6,500


def open_tokenizer(path: Path, vocab_size: int, *, allow_special_tokens: bool = False) -> Tokenizer:
    """Open a tokenizer, without truncation and padding. Raises BundleError if the file is invalid or has ids that the model lacks.

    Unless `allow_special_tokens`, the text of a special token in an input, such as `[SEP]`, is encoded as ordinary text.
    """
    text = contract.read_text(path.parent, path.name, most_bytes=contract.MOST_TOKENIZER_BYTES)
    try:
        described = json.loads(text)
        if (problem := next(_problems(described), None)) is not None:
            raise contract.BundleError(f"{path} is refused: {problem}. Choose another checkpoint, or correct its tokenizer.")
        tokenizer: Tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if not allow_special_tokens:
            tokenizer.encode_special_tokens = True
            _hide_pieces(tokenizer, described)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    except contract.BundleError:
        raise
    except RecursionError:
        raise contract.BundleError(f"{path} cannot be read: it is nested too deeply. Export the bundle again.") from None
    except BaseException as error:  # the library raises plain `Exception`; a panic is no `Exception`
        if not isinstance(error, Exception) and not panicked(error):
            raise
        raise contract.BundleError(f"{path} cannot be read: {in_a_line(error)}. Export the bundle again.") from error
    if largest >= vocab_size:
        raise contract.BundleError(
            f"{path} has a token {largest}, and the model has a vocabulary of {vocab_size}. Export the bundle again."
        )
    return tokenizer


def check_form(file: Path) -> None:
    """Check the patterns and templates of a checkpoint's tokenizer before an export. Other errors in the file are found when it is opened.

    Raises BundleError for what `open_tokenizer` would refuse when the bundle is served.
    """
    if not file.is_file() or file.stat().st_size > contract.MOST_TOKENIZER_BYTES:
        return
    try:
        described = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(described, dict) and (problem := next(_problems(described), None)) is not None:
        raise contract.BundleError(f"{file} is refused: {problem}. Choose another checkpoint, or correct its tokenizer.")


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of a text. `Tokenizer.encode` is not used, because it holds the GIL for 0.6 s per million characters."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def text_of(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of token ids. `Tokenizer.decode` is not used, because it holds the GIL."""
    (text,) = texts_of(tokenizer, [ids], skip_special_tokens=skip_special_tokens)
    return text


def texts_of(tokenizer: Tokenizer, lists: list[list[int]], *, skip_special_tokens: bool = False) -> list[str]:
    """Return the text of each list of token ids. Raises TokenizationFailed for ids at which the tokenizer's decoder panics."""
    try:
        texts: list[str] = tokenizer.decode_batch(lists, skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        if not panicked(error):
            raise
        raise TokenizationFailed("the decoder of this model's tokenizer fails at these tokens: send others", param="ids") from None
    return texts


def bytes_of(tokenizer: Tokenizer, lists: list[list[int]]) -> int:
    """Return an estimate of the size in bytes of the text of these ids, without decoding them. The text may be larger by the factor that
    `MOST_GROWTH` has for decoders.
    """
    counts = Counter(token_id for ids in lists for token_id in ids)
    return sum(count * len((tokenizer.id_to_token(token_id) or "").encode()) for token_id, count in counts.items())


def _hide_pieces(tokenizer: Tokenizer, described: Any) -> None:
    """Give special tokens random names in the vocabulary if the model would encode ordinary text as one of them, as with SentencePiece."""
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = {
        content
        for content, token_id in added.items()
        if any(token_id in tokenizer.encode(text, add_special_tokens=False).ids for text in (content, f"a{content}a", f"a {content} a"))
    }
    if not found:
        return
    model: Any = {**described["model"]}
    vocabulary = model["vocab"]
    unknown = vocabulary[model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    hidden = {content: f"{content}{secrets.token_hex(16)}" for content in found if content != unknown}
    if isinstance(vocabulary, list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {hidden.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    if "merges" in model:
        model["merges"] = [
            merge for merge in model["merges"] if "".join(merge.split(" ") if isinstance(merge, str) else merge) not in hidden
        ]
    tokenizer.model = Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "added_tokens": []})).model


def panicked(error: BaseException) -> bool:
    """Return whether the library panicked, as it does when a pattern takes too many steps."""
    return type(error).__module__ == "pyo3_runtime"


def _problems(described: Any) -> Iterator[str]:
    if not isinstance(described, dict):
        yield f"it holds {described!r:.40} where an object is expected"
        return
    if isinstance(added := described.get("added_tokens"), list) and len(added) > MOST_ADDED_TOKENS:
        yield f"it has {len(added)} added tokens, and {MOST_ADDED_TOKENS} are the most"
    for part, most in MOST_GROWTH.items():
        growth = 1
        for found in _objects(described.get(part)):
            if isinstance(pattern := found.get("Regex"), str) and (problem := _problem(pattern)) is not None:
                yield f"the pattern {pattern!r:.80} of its {part} {problem}, and some texts would take it for ever"
            if found.get("type") == "Replace" and isinstance(content := found.get("content"), str):
                growth *= max(len(content), 1)
            if found.get("type") == "TemplateProcessing":
                yield from _problems_of_template(found)
        if growth > most:
            yield f"its {part} can make {growth} characters of one, and {most} are the most"


def _problems_of_template(template: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a template of special tokens. A template that the library refuses anyway is not checked."""
    special = template.get("special_tokens")
    for name in ("single", "pair"):
        pieces = [piece for piece in template.get(name) or () if isinstance(piece, dict)]
        texts = [piece["Sequence"].get("id") for piece in pieces if isinstance(piece.get("Sequence"), dict)]
        if len(texts) > len(set(map(str, texts))):
            yield f"its template `{name}` has a text more than once"
        ids = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece.get("SpecialToken"), dict)]
        tokens = [special.get(id_) for id_ in ids if isinstance(id_, str)] if isinstance(special, dict) else []
        added = sum(len(token["ids"]) for token in tokens if isinstance(token, dict) and isinstance(token.get("ids"), list))
        if added > MOST_ADDED:
            yield f"its template `{name}` adds {added} special tokens, and {MOST_ADDED} are the most"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _objects(each)


class _Group:
    """A group of a pattern, parsed up to the current position."""

    def __init__(self) -> None:
        self.chooses = False  # whether the group can match at one position in several ways
        self.opened = 0  # unbounded repetitions in the current branch
        self.most = 0  # largest number of unbounded repetitions in any branch
        self.failing = 0  # unbounded repetitions before a part that may not match (see MOST_FAILING)
        # In how many ways these can match at one position:
        self._others = 0  # the earlier branches, before a `|`
        self._ways = 1  # the parts of this branch that are complete, without the newest part, after which a quantifier may follow
        self._last = 1  # the newest part

    @property
    def ways(self) -> int:
        """Return the number of ways in which the group can match at one position. Unbounded repetitions are not counted."""
        return min(self._others + self._ways * self._last, _OPEN)

    def part(self, ways: int = 1, failing: int = 0, *, needed: bool) -> None:
        """Add a part to the current branch. `ways` and `failing` are the values of these attributes for the part itself. `needed` means
        that the part must occur at least once.
        """
        self._ways, self._last = min(self._ways * self._last, _OPEN), ways
        self.failing = max(self.failing, failing + needed * self.opened)

    def repeat(self, least: int, most: int) -> None:
        """Record that the branch's last part is repeated `least` to `most` times."""
        self._last = min(sum(self._last**times for times in range(min(least, most), max(least, most) + 1)), _OPEN)

    def branch(self) -> None:
        self._others, self._ways, self._last = self.ways, 1, 1
        self.chooses, self.opened = True, 0

    def open(self, count: int = 1) -> None:
        self.opened += count
        self.most = max(self.most, self.opened)


def _problem(pattern: str) -> str | None:
    """Return why a pattern may take too many steps, as the end of a sentence, or None if it does not."""
    groups = [_Group()]
    last: _Group | None = None  # the group that ended just before `at`, or None
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            escaped = pattern[at + 1 : at + 2]
            if escaped in "gkX" or escaped in "123456789":
                return "refers back"
            at = pattern.find("}", at) + 1 if pattern[at + 2 : at + 3] == "{" and escaped in "pPxo" and "}" in pattern[at:] else at + 2
            groups[-1].part(needed=_is_needed(pattern, at))
            last = None
            continue
        if letter == "[":
            at, last = _after_class(pattern, at), None
            groups[-1].part(needed=_is_needed(pattern, at))
            continue
        if letter == "(":
            if pattern.startswith(("(?~", "(?("), at):
                return "has a condition"
            groups.append(_Group())
            at += len("(?") if pattern.startswith("(?", at) else 1  # skips the `?` of `(?`, which is no repetition
            last = None
            continue
        if letter == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1].part(last.ways, last.failing, needed=_is_needed(pattern, at + 1))
            groups[-1].open(last.most)
            groups[-1].chooses |= last.chooses
        elif letter == "|":
            groups[-1].branch()
            last = None
        elif repeated := _repetition(pattern, at):
            least, most, length = repeated
            if most > LARGE_REPEAT:
                if last is not None and last.chooses:
                    return "repeats a group that has a choice in it"
                groups[-1].open()
            else:
                groups[-1].repeat(least, most)
            groups[-1].chooses |= least != most
            at += length
            if pattern[at : at + 1] in ("?", "+") and letter != "{":  # skip the mark of a lazy or possessive repetition
                at += 1
            elif _repetition(pattern, at) and most > 1:
                return "repeats a repetition"
            last = None
            if groups[-1].most > MOST_OPEN:
                return f"has more than {MOST_OPEN} open repetitions one after the other"
            continue
        else:
            groups[-1].part(needed=_is_needed(pattern, at + 1))
            last = None
        at += 1
    while len(groups) > 1:  # there are unclosed groups, which the library refuses
        last = groups.pop()
        groups[-1].part(last.ways, last.failing, needed=True)
        groups[-1].open(last.most)
    if groups[0].most > MOST_OPEN:
        return f"has more than {MOST_OPEN} open repetitions one after the other"
    if groups[0].failing > MOST_FAILING:
        return "has open repetitions one after the other before something that may be missing"
    return f"matches one place in more than {MOST_WAYS} ways" if groups[0].ways > MOST_WAYS else None


def _is_needed(pattern: str, end: int) -> bool:
    """Return whether the part of a pattern that ends at `end` must occur at least once."""
    repeated = _repetition(pattern, end)
    return repeated is None or repeated[0] > 0


_OPEN = 10**9


def _repetition(pattern: str, at: int) -> tuple[int, int, int] | None:
    """Return (least, most, characters) of the repetition at this position, or None if there is none."""
    simple = {"*": (0, _OPEN, 1), "+": (1, _OPEN, 1), "?": (0, 1, 1)}.get(pattern[at : at + 1])
    if simple is not None or pattern[at : at + 1] != "{":
        return simple
    end = pattern.find("}", at)
    least, comma, most = pattern[at + 1 : end].partition(",")
    if end < 0 or not all(part == "" or part.isdecimal() for part in (least, most)) or not (least or most):
        return None
    first = int(least[:9] or 0)
    return first, (int(most[:9] or _OPEN) if comma else first), end + 1 - at


def _after_class(pattern: str, at: int) -> int:
    """Return the position after the character class `[..]` at `at`, which may contain nested classes."""
    depth = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif letter == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # a `]` directly after `[` is a character of the class
        elif letter == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at
