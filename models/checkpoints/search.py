"""Reads what folders say about search: how queries and documents become token matrices, and heads beside the weights.

- sentence-transformers 6: modules Transformer, Dense (of tokens), MultiVectorMask, Normalize; `query_length`, `document_length` and
  `query_expansion` among the settings of the Transformer.
- PyLate: modules Transformer, Dense; markers, lengths and expansion in `config_sentence_transformers.json`.
- Stanford ColBERT: the architecture HF_ColBERT, whose weights have `linear.weight`; markers and lengths in `artifact.metadata`.
- SparseStaticEmbedding: a weight for each token, as `weight` among its tensors, or as JSON of tokens with weights.
- BGE-M3: `sparse_linear` and `colbert_linear` beside the weights, as .safetensors, or .pt, of which only tensors are read.
"""

import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.encoder.heads import Dense, TokenMatrix
from models.encoder.pipeline import Pipeline, filled
from models.encoder.retrieval import TokenWeights
from models.folders.folder import (
    CheckpointError,
    JsonSettings,
    present,
    read_safetensors,
    read_settings,
    read_tensors,
    read_tokenizer,
    regular,
    rehearsing,
)

STANFORD = "HF_ColBERT"
ROLES = ("query", "document")
QUERY_TABLE = "query_weights.f32"  # name of a bundle's file: little-endian float32
MOST_HEAD_BYTES = 2**30
UNWEIGHTED = ("cls_token", "eos_token", "sep_token", "pad_token", "unk_token")  # special tokens that BGE-M3 gives no weight


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a folder says, under the names of the manifest's fields."""

    sparse: dict[str, Any] = field(default_factory=dict)
    multivector: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, dict[str, Any]] | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    query_table: Tensor | None = None  # (V,), the weight of each token of a query


def read_colbert(pipeline: Pipeline, prompting: JsonSettings, prompts: dict[str, str], tokenizer_file: Path, stanford: bool) -> Search:
    """Return what the folder says about token matrices. `prompting`: the settings of config_sentence_transformers.json, or of Stanford's
    artifact.metadata. Raises CheckpointError for settings that are not supported.
    """
    tokenizer, special = read_tokenizer(tokenizer_file), _special_tokens(pipeline)
    pylate = stanford or prompting.get("model_type", "") == "ColBERT"
    how = prompting if pylate else pipeline.settings
    if stanford:
        prefixes = {"query": how.get("query_token_id", "[unused0]"), "document": how.get("doc_token_id", "[unused1]")}
        lengths = {"query": None, "document": how.get("doc_maxlen", None)}
        words = list(string.punctuation) if how.get("mask_punctuation", True) else []
    else:
        prefixes = {role: how.get(f"{role}_prefix", "") if pylate else prompts.get(role, "") for role in ROLES}
        lengths = {role: how.get(f"{role}_length", None) for role in ROLES}
        words = how.get("skiplist_words", list(string.punctuation)) if pylate else _skipped_words(pipeline.mask)
    expansion = _expansion(how, tokenizer, special, pylate=pylate, stanford=stanford)
    if expansion is not None:
        floor, fixed = expansion["tokens"], expansion.pop("fixed")
        lengths["query"] = floor if fixed else lengths["query"] and max(lengths["query"], floor)
    roles, written = {}, dict(prompts)
    for role in ROLES:
        marker_id, text = _marker(prefixes[role], tokenizer, legacy=pylate)
        rest = prompts.get(role, "").removeprefix(prefixes[role]) if pylate else ""
        if text + rest:
            written[role] = text + rest
        else:
            written.pop(role, None)
        roles[role] = {"prompt": role if role in written else None, "marker_id": marker_id, "max_tokens": lengths[role]}
    roles["query"]["expansion"] = expansion
    unknown = _id_of(special, "unk_token", tokenizer)
    skipped = {tokenizer.token_to_id(word) for word in words} - {None, unknown}
    mean = prompting.get("similarity_fn_name", "maxsim") == "meanmaxsim"
    return Search(multivector={"skipped_ids": tuple(sorted(skipped)), "mean": mean}, roles=roles, prompts=written)


def _skipped_words(mask: JsonSettings | None) -> list[str]:
    if mask is None:
        return []
    for key, supported in (("skiplist_tasks", ["document"]), ("keep_only_token_ids", [])):
        mask.allow(key, supported)
    words: list[str] = mask.get("skiplist_words", [])
    return words


def _expansion(how: JsonSettings, tokenizer: Tokenizer, special: JsonSettings, *, pylate: bool, stanford: bool) -> dict[str, Any] | None:
    """Return the fields of `Expansion`, and whether a query has exactly so many tokens; None without expansion."""
    token: str | None = None
    if stanford or (pylate and "query_expansion" not in how.values):
        if not how.get("do_query_expansion", True):
            return None
        attended = how.get("attend_to_expansion_tokens", how.get("attend_to_mask_tokens", False))
        tokens, fixed = how.get("query_maxlen" if stanford else "query_length", 32), True
    else:
        if (values := how.get("query_expansion", None)) is None:
            return None
        inner = JsonSettings(values, how.file)
        attended, tokens, token = inner.get("attend", False), inner.need("length"), inner.get("token", None)
        fixed = inner.pick("strategy", "fixed", {"fixed": "fixed", "min": "min"}) == "fixed"
    found = tokenizer.token_to_id(token) if token is not None else None
    if token is None:
        found = next((each for name in ("mask_token", "eos_token") if (each := _id_of(special, name, tokenizer)) is not None), None)
    if found is None:
        raise CheckpointError(f"{how.file}: queries are filled up with {token or 'a mask token'!r}, which the tokenizer has not; add it")
    return {"token_id": found, "tokens": tokens, "attended": attended, "fixed": fixed}


def _marker(text: str, tokenizer: Tokenizer, *, legacy: bool) -> tuple[int | None, str]:
    """Return the token with which a prompt begins, and the rest of the prompt. `legacy`: the token may be any of the vocabulary."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    pieces = [*sorted(added, key=len, reverse=True), *([text, *text.split(maxsplit=1)[:1]] if legacy else [])]
    for piece in pieces:
        if piece and text.startswith(piece) and (marker_id := tokenizer.token_to_id(piece)) is not None:
            return marker_id, text[len(piece) :].lstrip()
    return None, text


def _special_tokens(pipeline: Pipeline) -> JsonSettings:
    return read_settings(pipeline.transformer / "tokenizer_config.json", required=False)


def _id_of(special: JsonSettings, name: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of a special token. Without settings of the tokenizer it has its usual names."""
    told = special.get(name, None)
    usual = {"mask_token": ("[MASK]", "<mask>"), "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "eos_token": ("</s>",)}
    usual |= {"pad_token": ("[PAD]", "<pad>"), "unk_token": ("[UNK]", "<unk>")}
    texts = usual[name] if told is None else (told["content"] if isinstance(told, dict) else told,)
    return next((found for text in texts if (found := tokenizer.token_to_id(text)) is not None), None)


def read_heads(pipeline: Pipeline, tokenizer_file: Path) -> tuple[TokenWeights | None, TokenMatrix | None, Search]:
    """Return the heads in files beside the weights, as BGE-M3 has them. Raises CheckpointError if a file has other tensors."""
    folder, special = pipeline.transformer, _special_tokens(pipeline)
    weights, vectors = (_linear(folder, name) for name in ("sparse_linear", "colbert_linear"))
    if weights is None and vectors is None:
        return None, None, Search()
    ids = {_id_of(special, name, read_tokenizer(tokenizer_file)) for name in UNWEIGHTED} - {None}
    head = None if vectors is None else Dense(vectors.in_features, vectors.out_features, activation="identity")
    if head is not None and vectors is not None:
        head.linear = vectors
    return (
        None if weights is None else TokenWeights(weights),
        None if head is None else TokenMatrix([head]),
        Search(sparse={"ignored_ids": tuple(sorted(each for each in ids if each is not None))}, multivector={"skips_first": True}),
    )


def read_query_table(folder: Path, tokenizer_file: Path, vocab_size: int) -> Search:
    """Return the weights of queries' tokens in the `folder` of a SparseStaticEmbedding. Raises CheckpointError if there are none, or if
    they do not fit the documents' tokenizer.
    """
    settings, tokenizer = read_settings(folder / "config.json", required=False), read_tokenizer(tokenizer_file)
    vocabulary = tokenizer.get_vocab()
    if read_tokenizer(folder / "tokenizer.json").get_vocab() != vocabulary:
        raise CheckpointError(f"{folder} has another vocabulary than the documents; use a checkpoint with one")
    weights = torch.zeros(vocab_size, device="cpu")
    if (path := settings.get("path", None)) is not None:
        name = Path(path).name if Path(path).suffix == ".json" else "idf.json"
        file = next((file for file in (folder / name, folder.parent / name) if present(file)), folder / name)
        for token, weight in read_settings(file).values.items():
            if token in vocabulary:
                weights[vocabulary[token]] = float(weight)
    else:
        file, table = folder, read_tensors(folder).get("weight")
        if table is None or table.dim() != 1 or len(table) > vocab_size:
            raise CheckpointError(f"{folder} has no `weight` for each of up to {vocab_size} tokens; copy it again")
        if not rehearsing():
            weights[: len(table)] = table
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise CheckpointError(f"{file} has a weight that is below 0 or not finite; copy it again")
    return Search(sparse={"query_table": QUERY_TABLE}, query_table=weights)


def _linear(folder: Path, name: str) -> nn.Linear | None:
    file = next((folder / f"{name}.{kind}" for kind in ("safetensors", "pt") if present(folder / f"{name}.{kind}")), None)
    if file is None:
        return None
    tensors = read_safetensors(file) if file.suffix == ".safetensors" else _of_pickle(file)
    weight = tensors.get("weight")
    if weight is None or weight.dim() != 2 or (name == "sparse_linear" and len(weight) != 1):
        raise CheckpointError(f"{file} has no `weight` of a linear layer; copy it again")
    return filled(nn.Linear(weight.shape[1], weight.shape[0]), {key: tensor.float() for key, tensor in tensors.items()}, file)


def _of_pickle(file: Path) -> dict[str, Tensor]:
    """Read a dictionary of tensors that torch has saved. Nothing else in it is read, so no code is run."""
    tensors = torch.load(regular(file, most_bytes=MOST_HEAD_BYTES), map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file} is not a dictionary of tensors; copy it again")
    return {name: tensor.to("meta") for name, tensor in tensors.items()} if rehearsing() else tensors
