"""Makes the tokenizer of a checkpoint that has only vocab.txt, the word pieces of BERT's tokenizer, one per line.

The result gives the ids of transformers' BertTokenizer for the same files. Settings are read from tokenizer_config.json, and added tokens
also from special_tokens_map.json and added_tokens.json.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from models.folders.folder import MOST_TOKENIZER_BYTES, CheckpointError, JsonSettings, read_settings, regular

VOCABULARY = "vocab.txt"
CLASSES = [f"{family}Tokenizer{kind}" for family in ("Bert", "DistilBert", "Electra") for kind in ("", "Fast")]
SPECIAL = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}


def wordpiece_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of the vocab.txt in `folder`. Raises CheckpointError if it is that of another tokenizer than BERT's, or if a
    special or added token is not in it.
    """
    file = regular(folder / VOCABULARY, most_bytes=MOST_TOKENIZER_BYTES)
    ids: dict[str, int] = WordPiece.read_file(str(file))
    settings = read_settings(folder / "tokenizer_config.json", required=False)
    for each in (settings, read_settings(folder / "config.json", required=False)):
        each.allow("tokenizer_class", *CLASSES)
    settings.allow("do_basic_tokenize", True)
    special = {name: _token(settings.get(name, default), special=True) for name, default in SPECIAL.items()}
    unknown, cls, sep = (special[name].content for name in ("unk_token", "cls_token", "sep_token"))
    tokenizer = Tokenizer(WordPiece(ids, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents", None),  # None: if the text is lower-cased
        lowercase=settings.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    added = [token for name, token in special.items() if name not in ("pad_token", "mask_token") or token.content in ids]
    for token in (*added, *_added(folder, settings)):
        if token.content not in ids:
            raise CheckpointError(f"{file} has no token {token.content!r}, which the tokenizer needs; copy it and its settings again")
        tokenizer.add_tokens([token])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0", pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", special_tokens=[(cls, ids[cls]), (sep, ids[sep])]
    )
    return tokenizer


def _added(folder: Path, settings: JsonSettings) -> list[AddedToken]:
    """Return the tokens that are matched in a text before it is split, besides those of SPECIAL."""
    special_tokens = read_settings(folder / "special_tokens_map.json", required=False)
    lists = (each.get("additional_special_tokens", []) for each in (settings, special_tokens))
    plain = read_settings(folder / "added_tokens.json", required=False).values
    return [
        *(_token(each, special=True) for tokens in lists for each in tokens),
        *(_token(each, special=False) for each in settings.get("added_tokens_decoder", {}).values()),
        *(_token(each, special=False) for each in plain),
    ]


def _token(value: str | dict[str, Any], *, special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    return AddedToken(**{name: each for name, each in value.items() if name != "__type"})
