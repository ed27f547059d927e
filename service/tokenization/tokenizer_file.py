"""Opens a bundle's tokenizer. The file comes from a checkpoint, so it is refused if tokenising some text could take too long.

The `tokenizers` library matches regular expressions with Oniguruma, which backtracks. After ten million steps it panics, with an error that
is not an `Exception`. So only the expressions of published tokenizers (`patterns.py`) are accepted without a setting.
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
from service.tokenization.patterns import PUBLISHED

_OTHERWISE = "Choose another checkpoint, or correct its tokenizer"
# The most characters that each part of the tokenizer may make from one, because a normalizer uses 17 bytes of memory per character.
MOST_GROWTH = {"normalizer": 16, "pre_tokenizer": 16, "post_processor": 16, "decoder": 4}
MOST_ADDED = 1_000  # most special tokens that a template may add to a text
MOST_ADDED_TOKENS = 16_384  # most tokens beside the vocabulary: opening takes 50 us for each. Published tokenizers have up to 6,500
MOST_ADDED_CHARACTERS = 2**20  # most characters of all of them: each takes 0.2 us


def open_tokenizer(path: Path, vocab_size: int, *, allow_special_tokens: bool = False, any_pattern: bool = False) -> Tokenizer:
    """Open a tokenizer, without truncation and padding. Raises BundleError if the file is invalid or has ids that the model lacks.

    Unless `allow_special_tokens`, the text of a special token in an input, such as `[SEP]`, is encoded as ordinary text.
    Unless `any_pattern`, a tokenizer with a regular expression that is not in `PUBLISHED` is refused.
    """
    text = contract.read_text(path.parent, path.name, most_bytes=contract.MOST_TOKENIZER_BYTES)
    try:
        described = json.loads(text)
        if (problem := next(_problems(described, any_pattern=any_pattern), None)) is not None:
            raise contract.BundleError(f"{path} is refused: {problem}.")
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


def check_form(file: Path, *, any_pattern: bool = False) -> None:
    """Check a checkpoint's tokenizer before an export. Other errors in the file are found when it is opened.

    Raises BundleError for what `open_tokenizer` would refuse when the bundle is served.
    """
    if not file.is_file() or file.stat().st_size > contract.MOST_TOKENIZER_BYTES:
        return
    try:
        described = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(described, dict) and (problem := next(_problems(described, any_pattern=any_pattern), None)) is not None:
        raise contract.BundleError(f"{file} is refused: {problem}.")


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


def _problems(described: Any, *, any_pattern: bool) -> Iterator[str]:
    """Yield what is wrong with a tokenizer, and the next step."""
    if not isinstance(described, dict):
        yield f"it holds {described!r:.40} where an object is expected. {_OTHERWISE}"
        return
    if isinstance(added := described.get("added_tokens"), list):
        characters = sum(len(str(token.get("content"))) for token in added if isinstance(token, dict))
        if len(added) > MOST_ADDED_TOKENS:
            yield f"it has {len(added)} added tokens, and {MOST_ADDED_TOKENS} are the most. {_OTHERWISE}"
        if characters > MOST_ADDED_CHARACTERS:
            yield f"its added tokens have {characters} characters, and {MOST_ADDED_CHARACTERS} are the most. {_OTHERWISE}"
    for part, most in MOST_GROWTH.items():
        growth = 1
        for found in _objects(described.get(part)):
            if isinstance(pattern := found.get("Regex"), str) and not any_pattern and pattern not in PUBLISHED:
                yield (
                    f"the pattern {pattern!r:.80} of its {part} is not one of published tokenizers, and some texts could take it for ever. "
                    "If you trust the checkpoint, export it with --any-tokenizer-pattern and serve it with --set any_tokenizer_pattern=true"
                )
            if found.get("type") == "Replace" and isinstance(content := found.get("content"), str):
                growth *= max(len(content), 1)
            if found.get("type") == "TemplateProcessing":
                yield from _problems_of_template(found)
        if growth > most:
            yield f"its {part} can make {growth} characters of one, and {most} are the most. {_OTHERWISE}"


def _problems_of_template(template: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a template of special tokens. A template that the library refuses anyway is not checked."""
    special = template.get("special_tokens")
    for name in ("single", "pair"):
        pieces = [piece for piece in template.get(name) or () if isinstance(piece, dict)]
        texts = [piece["Sequence"].get("id") for piece in pieces if isinstance(piece.get("Sequence"), dict)]
        if len(texts) > len(set(map(str, texts))):
            yield f"its template `{name}` has a text more than once. {_OTHERWISE}"
        ids = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece.get("SpecialToken"), dict)]
        tokens = [special.get(id_) for id_ in ids if isinstance(id_, str)] if isinstance(special, dict) else []
        added = sum(len(token["ids"]) for token in tokens if isinstance(token, dict) and isinstance(token.get("ids"), list))
        if added > MOST_ADDED:
            yield f"its template `{name}` adds {added} special tokens, and {MOST_ADDED} are the most. {_OTHERWISE}"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _objects(each)
