"""Folders for search, written by sentence-transformers with random weights, give its sparse vectors and token matrices."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers as library
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SparseAutoEncoder, SparseStaticEmbedding, SpladePooling

from export import contract
from models.checkpoints.published import CheckpointError, load_checkpoint
from models.encoder.heads import SentenceOutput
from service.encoding.token_matrix import matrix_of
from service.tokenization.texts import Cut, Encoded, TextEncoder
from tests.checkpoints import SPECIAL, VOCABULARY, tiny_tokenizer
from tests.models.checkpoints import tiny

TEXTS = ("the cat", "A river, in Paris; and a stone house!", "password")
ROUNDED = 2e-6  # float32: the same sums in another order
Made = tuple[Path, list[NDArray[np.float32]]]  # a folder, and what sentence-transformers makes of TEXTS


def trunk(folder: Path, model_class: str, settings: dict[str, object]) -> Path:
    tiny.build(model_class, {**settings, "vocab_size": len(VOCABULARY)}).save_pretrained(folder)
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), model_max_length=48, **names).save_pretrained(folder)
    return folder


def splade(folder: Path, model_class: str, settings: dict[str, object], *, old: bool = False, **pooling: str) -> Made:
    plain = trunk(folder / "plain", model_class, settings)
    body = MLMTransformer(str(plain)) if old else Transformer(str(plain), transformer_task="fill-mask")
    model = library.SparseEncoder(modules=[body, SpladePooling(**pooling)], device="cpu")
    model.save(str(folder / "saved"))
    return folder / "saved", list(model.encode(list(TEXTS), convert_to_sparse_tensor=False).numpy())


def code(folder: Path) -> Made:
    """CSR."""
    plain = trunk(folder / "plain", "BertModel", tiny.BERT)
    coder = SparseAutoEncoder(24, 64, k=5, normalize=True)
    for parameter in coder.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    model = library.SparseEncoder(modules=[Transformer(str(plain)), Pooling(24, pooling_mode="cls"), coder], device="cpu")
    model.save(str(folder / "saved"))
    return folder / "saved", list(model.encode(list(TEXTS), convert_to_sparse_tensor=False).numpy())


SHAPES: dict[str, Callable[[Path], Made]] = {
    "SPLADE of BERT": lambda folder: splade(folder, "BertForMaskedLM", tiny.BERT, old=True),
    "SPLADE of DistilBERT, sums, two logarithms": lambda folder: splade(
        folder, "DistilBertForMaskedLM", tiny.DISTILBERT, pooling_strategy="sum", activation_function="log1p_relu"
    ),
    "SPLADE of RoBERTa": lambda folder: splade(folder, "RobertaForMaskedLM", {**tiny.BERT, "pad_token_id": 0}),
    "CSR": code,
}


def projection(width: int = 8) -> Dense:
    torch.manual_seed(2)
    return Dense(24, width, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")


def colbert(folder: Path) -> library.MultiVectorEncoder:
    """Queries of at least 16 tokens, which attend to the filling; documents without full stops."""
    plain = trunk(folder / "plain", "BertModel", tiny.BERT)
    body = Transformer(str(plain), document_length=9, query_expansion={"strategy": "min", "attend": True, "length": 16})
    modules = [body, projection(), MultiVectorMask(skiplist_words=[".", ";", "☃"]), Normalize(module_input_name="token_embeddings")]
    made = library.MultiVectorEncoder(modules=modules, prompts={"query": "a dog ", "document": ""}, device="cpu")
    made.save(str(folder / "saved"))
    return made


def pylate(folder: Path) -> library.MultiVectorEncoder:
    """Classic: no token attends to the filling. The marker of queries is a token with a space, and a prompt follows it."""
    saved = trunk(folder / "saved", "BertModel", {**tiny.BERT, "vocab_size": len(VOCABULARY)})
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    tokenizer.add_tokens([transformers.AddedToken("[Q] ", normalized=False), transformers.AddedToken("[D] ", normalized=False)])
    tokenizer.save_pretrained(saved)
    model = transformers.BertModel.from_pretrained(saved)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(saved)
    (saved / "1_Dense").mkdir()
    projection().save(str(saved / "1_Dense"))
    types = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    write(saved / "modules.json", [{"idx": i, "name": str(i), "path": path, "type": types[path]} for i, path in enumerate(types)])
    prompts = {"query": "in a river ", "document": ""}
    lengths = {"query_length": 12, "document_length": 10, "query_prefix": "[Q] ", "document_prefix": "[D] "}
    about = {"model_type": "ColBERT", "prompts": prompts, **lengths, "attend_to_expansion_tokens": False}
    write(saved / "config_sentence_transformers.json", about)
    return library.MultiVectorEncoder(str(saved), device="cpu")


def stanford(folder: Path) -> library.MultiVectorEncoder:
    """Markers are words of the vocabulary, which stand for [unused0] and [unused1]."""
    saved = trunk(folder / "saved", "BertModel", tiny.BERT)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(saved / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": projection().linear.weight.detach()}, saved / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    write(saved / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    about = {"query_token_id": "berlin", "doc_token_id": "capital", "query_maxlen": 14, "doc_maxlen": 30, "mask_punctuation": True}
    write(saved / "artifact.metadata", about)
    return library.MultiVectorEncoder(str(saved), device="cpu")


def write(file: Path, values: object) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")


def outputs(folder: Path) -> Iterator[SentenceOutput]:
    """Of each text alone."""
    checkpoint = load_checkpoint(folder)
    for text in TEXTS:
        ids = torch.tensor([tiny_tokenizer().encode(text).ids])
        with torch.inference_mode():
            yield checkpoint.model(ids, torch.ones_like(ids))


@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_vectors_are_those_of_sentence_transformers(shape: str, tmp_path: Path) -> None:
    folder, theirs = SHAPES[shape](tmp_path)
    for want, output in zip(theirs, outputs(folder), strict=True):
        assert output.sparse is not None
        got = output.sparse[0].numpy()
        assert np.abs(got - want).max() <= ROUNDED * max(1, want.max())
        assert np.array_equal(np.flatnonzero(got), np.flatnonzero(want))


@pytest.mark.parametrize("make", [colbert, pylate, stanford])
def test_token_matrices_are_those_of_sentence_transformers(make: Callable[[Path], library.MultiVectorEncoder], tmp_path: Path) -> None:
    """With the tokens of a service, which writes prompt, marker and filling by what the folder says."""
    theirs = make(tmp_path)
    checkpoint = load_checkpoint(tmp_path / "saved")
    about = contract.MultiVector(width=8, **checkpoint.search.multivector)
    roles = {role: contract.Role.model_validate(written) for role, written in (checkpoint.search.roles or {}).items()}
    texts = TextEncoder(
        checkpoint.tokenizer_file,
        max_tokens=checkpoint.max_tokens,
        vocab_size=checkpoint.config.vocab_size,
        pair_types=False,
        prompts=checkpoint.prompts,
        default_prompt=None,
        roles=roles,
    )
    for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        encoded = texts.encode(TEXTS, cut=Cut(), prompt=texts.prompt_of(role), role=roles[role])
        for each, want in zip(encoded, encode(list(TEXTS), batch_size=1), strict=True):
            assert isinstance(each, Encoded)
            mask = torch.ones(1, len(each.ids), dtype=torch.int64)
            mask[0, len(each.ids) - each.unattended :] = 2
            with torch.inference_mode():
                matrix = checkpoint.model(torch.tensor([each.ids]), mask).multivector[0].numpy()
            got = matrix_of(matrix, each.ids, about, role)
            assert got.shape == want.shape
            assert np.abs(got - np.asarray(want)).max() <= ROUNDED


def save_heads(folder: Path) -> dict[str, torch.nn.Linear]:
    torch.manual_seed(4)
    heads = {"sparse_linear": torch.nn.Linear(24, 1), "colbert_linear": torch.nn.Linear(24, 6)}
    for name, head in heads.items():
        torch.save(head.state_dict(), folder / f"{name}.pt")
    return heads


def test_the_heads_of_bge_m3_are_read_from_files_beside_the_weights(tmp_path: Path) -> None:
    """Pickles of tensors, from which no code is run."""
    folder = trunk(tmp_path / "m3", "BertModel", tiny.BERT)
    heads = save_heads(folder)
    checkpoint = load_checkpoint(folder)
    for output in outputs(folder):
        x = output.token_embeddings
        with torch.no_grad():
            assert (output.sparse - heads["sparse_linear"](x)[..., 0].relu()).abs().max() <= ROUNDED
            assert (output.multivector - torch.nn.functional.normalize(heads["colbert_linear"](x), dim=-1)).abs().max() <= ROUNDED
        assert output.embedding is not None
    ignored = [VOCABULARY[token] for token in checkpoint.search.sparse["ignored_ids"]]
    assert (ignored, checkpoint.search.multivector) == (["[PAD]", "[UNK]", "[CLS]", "[SEP]"], {"skips_first": True})
    torch.save({"weight": print}, folder / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        load_checkpoint(folder)


def router(folder: Path, *, of_json: bool = False) -> library.SparseEncoder:
    """Documents by SPLADE, queries by a table."""
    plain = trunk(folder / "plain", "BertForMaskedLM", tiny.BERT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    weight = torch.rand(len(VOCABULARY), generator=torch.Generator().manual_seed(5))
    documents = [Transformer(str(plain), transformer_task="fill-mask"), SpladePooling()]
    made = Router.for_query_document([SparseStaticEmbedding(tokenizer, weight=weight)], documents)
    model = library.SparseEncoder(modules=[made], device="cpu")
    model.save(str(folder / "saved"))
    if of_json:
        (place := folder / "saved" / "query_0_SparseStaticEmbedding").joinpath("model.safetensors").unlink()
        write(place / "config.json", {"frozen": False, "path": "someone/model/idf.json"})
        write(place / "idf.json", dict(zip(VOCABULARY, weight.tolist(), strict=True)))
    return model


@pytest.mark.parametrize("of_json", [False, True])
def test_queries_of_a_router_are_read_from_a_table(of_json: bool, tmp_path: Path) -> None:
    model = router(tmp_path, of_json=of_json)
    table = load_checkpoint(tmp_path / "saved").search.query_table
    assert table is not None
    for text, want in zip(TEXTS, model.encode_query(list(TEXTS), convert_to_sparse_tensor=False), strict=True):
        ids = set(tiny_tokenizer().encode(text, add_special_tokens=False).ids)
        got = torch.tensor([float(table[at]) if at in ids else 0.0 for at in range(len(VOCABULARY))])
        assert (got - want).abs().max() <= ROUNDED
    documents = model.encode_document(list(TEXTS), convert_to_sparse_tensor=False)
    for output, want in zip(outputs(tmp_path / "saved"), documents, strict=True):
        assert output.sparse is not None
        assert (output.sparse[0] - want).abs().max() <= ROUNDED


def test_a_plain_masked_language_model_is_read_as_asked(tmp_path: Path) -> None:
    folder = trunk(tmp_path / "plain", "BertForMaskedLM", tiny.BERT)
    ids = torch.tensor([tiny_tokenizer().encode(TEXTS[0]).ids])
    with torch.no_grad():
        logits = transformers.BertForMaskedLM.from_pretrained(folder).eval()(ids).logits
        got = load_checkpoint(folder, sparse=True).model(ids, torch.ones_like(ids)).sparse
    assert (got - logits.relu().log1p().amax(1)).abs().max() <= ROUNDED
    with pytest.raises(CheckpointError, match=r"nothing says what for.* give --sparse"):
        load_checkpoint(folder)
    for model_class in ("BertModel", "MPNetForMaskedLM"):
        other = trunk(tmp_path / model_class, model_class, tiny.BERT)
        with pytest.raises(CheckpointError, match=f"sparse vectors cannot be read from '{model_class}', but from BertForMaskedLM"):
            load_checkpoint(other, sparse=True)
