"""Folders for search, written by sentence-transformers with random weights, give its sparse vectors and token matrices."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers as library
import torch
import transformers
from numpy.typing import NDArray
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

from models.checkpoints.published import CheckpointError, load_checkpoint
from models.encoder.heads import SentenceOutput
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


SHAPES: dict[str, Callable[[Path], Made]] = {
    "SPLADE of BERT": lambda folder: splade(folder, "BertForMaskedLM", tiny.BERT, old=True),
    "SPLADE of DistilBERT, sums, two logarithms": lambda folder: splade(
        folder, "DistilBertForMaskedLM", tiny.DISTILBERT, pooling_strategy="sum", activation_function="log1p_relu"
    ),
    "SPLADE of RoBERTa": lambda folder: splade(folder, "RobertaForMaskedLM", {**tiny.BERT, "pad_token_id": 0}),
}


def outputs(folder: Path) -> Iterator[SentenceOutput]:
    """Of each text alone."""
    checkpoint = load_checkpoint(folder)
    for text in TEXTS:
        ids = torch.tensor([tiny_tokenizer().encode(text).ids])
        with torch.inference_mode():
            yield checkpoint.model(ids, torch.ones_like(ids))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_vectors_are_those_of_sentence_transformers(shape: str, tmp_path: Path) -> None:
    folder, theirs = SHAPES[shape](tmp_path)
    for want, output in zip(theirs, outputs(folder), strict=True):
        assert output.sparse is not None
        got = output.sparse[0].numpy()
        assert np.abs(got - want).max() <= ROUNDED * max(1, want.max())
        assert np.array_equal(np.flatnonzero(got), np.flatnonzero(want))


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
