"""tokenizer.json from the metadata of a GGUF file. The kinds are byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

A file names the expression by which a byte-level vocabulary splits text (tokenizer.ggml.pre). llama.cpp has a table of these names, and
so has this module, for the names that the supported architectures use.
"""

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from models.checkpoints.gguf.file import GgufFile
from models.folders.folder import CheckpointError

MOST_TOKEN_LENGTH = 1024  # of a SentencePiece token: the cost of recovering its merges grows with the square of the length
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_at(expression: str) -> Callable[[], PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


SPLITS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _digits,
    "llama-bpe": _split_at(_LLAMA3),
    "llama3": _split_at(_LLAMA3),
    "qwen2": _split_at(_QWEN2),
    "deepseek-r1-qwen": _split_at(_QWEN2),
}


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """Return the file's tokenizer. Raises CheckpointError for a kind that is not supported, and for lists that do not fit together."""
    kind = file.need("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.model={kind!r:.80} is not supported; supported: gpt2, llama")
    tokens = _texts(file, "tokenizer.ggml.tokens")
    tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    _add_tokens(file, tokenizer, tokens, byte_level=kind == "gpt2")
    # Older files of the kind "llama" have no such field, and mean that the token is added.
    if file.get("tokenizer.ggml.add_bos_token", bool, kind == "llama"):
        _begin_with(file, tokenizer, tokens)
    return tokenizer


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    split = file.need("tokenizer.ggml.pre", str)
    if split not in SPLITS:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.pre={split!r:.80} is not supported; supported: {', '.join(SPLITS)}")
    merges = [_pair(file, merge) for merge in _texts(file, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges has {merge!r:.80}, which is not a pair; use another file")
    return left, right


def _sentencepiece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    scores = file.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens and {len(scores)} scores; use another file")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary, scores), fuse_unk=True, byte_fallback=True))
    begins_with_space = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if begins_with_space else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if begins_with_space else steps)
    return tokenizer


def _merges(file: GgufFile, vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Recover the merges from the scores: every way to make a token of two tokens, the best score first, as transformers does."""
    found: list[tuple[float, int, int, str, str]] = []
    for (token, _), score in zip(vocabulary.items(), scores, strict=False):
        if len(token) > MOST_TOKEN_LENGTH:
            raise CheckpointError(f"{file.path} has a token of {len(token)} characters; the limit is {MOST_TOKEN_LENGTH}; use another file")
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = sorted(
            (pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary), key=lambda p: (vocabulary[p[0]], vocabulary[p[1]])
        )
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(found, key=lambda each: each[:3], reverse=True)]


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str], *, byte_level: bool) -> None:
    """Add the tokens that are never split: control tokens as special ones, which a text of a user cannot contain, and user-defined ones.

    In a byte-level vocabulary, a token with a character outside the alphabet of bytes is no control token, whatever the file says.
    """
    types = file.get("tokenizer.ggml.token_type", list, [])
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind == CONTROL and (not byte_level or alphabet.issuperset(token)):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _begin_with(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Let every text begin with the begin-of-text token."""
    number = file.need("tokenizer.ggml.bos_token_id", int)
    if number >= len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.bos_token_id={number}, and there are {len(tokens)} tokens; use another file")
    bos = tokens[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, number)]
    )


def _texts(file: GgufFile, key: str) -> list[str]:
    found: list[str] = file.need(key, list)
    if not found or not all(isinstance(text, str) for text in found):
        raise CheckpointError(f"{file.path}: {key} should be a list of texts; use another file")
    return found
