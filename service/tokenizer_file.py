"""Opening a bundle's tokenizer. The author of a checkpoint wrote it, and every text goes through it, so it must terminate on all of them.

The library's patterns are Oniguruma's, which backtracks and gives up after ten million steps, with a panic that is no `Exception`. A
pattern that could come near that is refused by its form: a repeated group with a choice in it, or a series of open repetitions. No
published tokenizer has either.
"""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from export import contract
from service.runtime import in_a_line

MOST_OPEN = 3  # open repetitions in a row: the worst cost is the text's length to this power
LARGE_REPEAT = 32  # times; from there on a repetition counts as open
MOST_GROWTH = 1_000  # characters that replacements may make from one


def open_tokenizer(path: Path, vocab_size: int, *, allow_special_tokens: bool = False) -> Tokenizer:
    """Open it, without truncation or padding. BundleError for a file that is no tokenizer, or has tokens that the model lacks.

    Unless special tokens are allowed, `[SEP]` in an input is plain letters and no separator.
    """
    text = contract.read_text(path.parent, path.name, most_bytes=contract.MOST_TOKENIZER_BYTES)
    try:
        described = json.loads(text)
        if (problem := next(_problems(described), None)) is not None:
            raise contract.BundleError(f"{path} is refused: {problem}. Choose another checkpoint, or mend its tokenizer.")
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
    except BaseException as error:  # the library's own have no base but `Exception`, its panics not even that
        if not isinstance(error, Exception) and not panicked(error):
            raise
        raise contract.BundleError(f"{path} cannot be read: {in_a_line(error)}. Export the bundle again.") from error
    if largest >= vocab_size:
        raise contract.BundleError(
            f"{path} has a token {largest}, and the model has a vocabulary of {vocab_size}. Export the bundle again."
        )
    return tokenizer


def _hide_pieces(tokenizer: Tokenizer, described: Any) -> None:
    """Rename special tokens that are also pieces of text in the vocabulary, as SentencePiece's are, to names that no text has."""
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
    """Whether the library panicked, as it does when a pattern takes too many steps."""
    return type(error).__module__ == "pyo3_runtime"


def _problems(described: Any) -> Iterator[str]:
    if not isinstance(described, dict):
        yield f"it holds {described!r:.40} where an object is expected"
        return
    growth = 1
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        for found in _objects(described.get(part)):
            if isinstance(pattern := found.get("Regex"), str) and (problem := _problem(pattern)) is not None:
                yield f"the pattern {pattern!r:.80} of its {part} {problem}, and some texts would take it for ever"
            if part == "normalizer" and found.get("type") == "Replace" and isinstance(content := found.get("content"), str):
                growth *= max(len(content), 1)
    if growth > MOST_GROWTH:
        yield f"its normalizer can make {growth} characters of one, and {MOST_GROWTH} are the most"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _objects(each)


class _Group:
    """A group of a pattern, as far as it has been read."""

    def __init__(self) -> None:
        self.chooses = False  # it can match one place in more than one way
        self.opened = 0  # open repetitions in the present branch
        self.most = 0  # in any branch

    def open(self, count: int = 1) -> None:
        self.opened += count
        self.most = max(self.most, self.opened)


def _problem(pattern: str) -> str | None:
    """Why the form of a pattern makes its time grow without bound, as the end of a sentence; None if it does not."""
    groups = [_Group()]
    last: _Group | None = None  # the group that has just ended, if one has
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            escaped = pattern[at + 1 : at + 2]
            if escaped in "gkX" or escaped in "123456789":
                return "refers back"
            at = pattern.find("}", at) + 1 if pattern[at + 2 : at + 3] == "{" and escaped in "pPxo" and "}" in pattern[at:] else at + 2
            last = None
            continue
        if letter == "[":
            at, last = _after_class(pattern, at), None
            continue
        if letter == "(":
            if pattern.startswith(("(?~", "(?("), at):
                return "has a condition"
            groups.append(_Group())
            at += len("(?") if pattern.startswith("(?", at) else 1  # the mark is no repetition
            last = None
            continue
        if letter == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1].open(last.most)
            groups[-1].chooses |= last.chooses
        elif letter == "|":
            groups[-1].chooses, groups[-1].opened, last = True, 0, None
        elif repeated := _repetition(pattern, at):
            least, most, length = repeated
            if most > LARGE_REPEAT:
                if last is not None and last.chooses:
                    return "repeats a group that has a choice in it"
                groups[-1].open()
            groups[-1].chooses |= least != most
            at += length
            if pattern[at : at + 1] in ("?", "+") and letter != "{":  # lazy or possessive
                at += 1
            elif _repetition(pattern, at) and most > 1:
                return "repeats a repetition"
            last = None
            if groups[-1].most > MOST_OPEN:
                return f"has more than {MOST_OPEN} open repetitions one after the other"
            continue
        else:
            last = None
        at += 1
    return f"has more than {MOST_OPEN} open repetitions one after the other" if groups[0].most > MOST_OPEN else None


_OPEN = 10**9


def _repetition(pattern: str, at: int) -> tuple[int, int, int] | None:
    """(least, most, characters) of the repetition that is written there."""
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
    """Where `[..]` ends, classes within it included."""
    depth = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif letter == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # at the beginning it is a letter
        elif letter == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at
