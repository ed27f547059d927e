"""A real checkpoint, all-MiniLM-L6-v2, gives the vectors that its users know."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from models.checkpoints.published import Checkpoint, load_checkpoint
from tests.texts import ODD, texts

SAME_VECTOR = 0.999999  # cosine; float32 leaves 1e-7 of it
ROUNDED = 1e-5  # float32: 24 bits, six layers, values of a few units
BATCH = 16  # texts
SAMPLE = [*texts()[::4], *ODD]


@pytest.fixture(scope="module")
def checkpoint(minilm: Path) -> Checkpoint:
    return load_checkpoint(minilm)


@pytest.fixture(scope="module")
def batches(checkpoint: Checkpoint) -> list[dict[str, Tensor]]:
    """The texts, cut at 256 tokens as sentence-transformers does, in batches of about one length."""
    tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
    tokenizer.enable_truncation(checkpoint.max_tokens)
    tokenizer.enable_padding(pad_id=checkpoint.pad_token_id)
    ordered = sorted(SAMPLE, key=len)
    encodings = [tokenizer.encode_batch(ordered[i : i + BATCH]) for i in range(0, len(ordered), BATCH)]
    return [
        {
            "input_ids": torch.tensor([e.ids for e in batch]),
            "attention_mask": torch.tensor([e.attention_mask for e in batch]),
            "token_type_ids": torch.tensor([e.type_ids for e in batch]),
        }
        for batch in encodings
    ]


@pytest.fixture(scope="module")
def vectors(checkpoint: Checkpoint, batches: list[dict[str, Tensor]]) -> Tensor:
    """Our vectors, one row a text, ordered by the length of the text."""
    with torch.no_grad():
        return torch.cat([checkpoint.model(**batch).embedding for batch in batches])


def test_what_the_folder_says(checkpoint: Checkpoint) -> None:
    assert (checkpoint.kind, checkpoint.architecture, checkpoint.pooling) == ("encoder", "BertModel", "mean")
    assert checkpoint.max_tokens == 256
    assert checkpoint.normalized
    assert checkpoint.uses_token_types
    assert not checkpoint.untrained
    assert (checkpoint.config.d_model, checkpoint.config.n_layers, checkpoint.config.n_heads) == (384, 6, 12)


def test_token_vectors_equal_transformers(minilm: Path, checkpoint: Checkpoint, batches: list[dict[str, Tensor]]) -> None:
    reference = transformers.AutoModel.from_pretrained(minilm).eval()
    with torch.no_grad():
        for batch in batches[::4]:
            theirs = reference(**batch).last_hidden_state * batch["attention_mask"].unsqueeze(-1)
            assert (checkpoint.model(**batch).token_embeddings - theirs).abs().max() <= ROUNDED


def test_sentence_vectors_equal_sentence_transformers(minilm: Path, vectors: Tensor) -> None:
    """More than 40 texts, of 0 to 600 words, in 16 scripts, with emoji, control characters and nothing at all."""
    import sentence_transformers as library

    ordered = sorted(SAMPLE, key=len)
    assert len(ordered) > 40
    theirs = library.SentenceTransformer(str(minilm), device="cpu").encode(ordered, convert_to_tensor=True, batch_size=BATCH)
    cosines = (vectors * theirs).sum(1)
    assert (vectors.norm(dim=1) - 1).abs().max() <= ROUNDED
    assert cosines.min() >= SAME_VECTOR


def test_the_texts_are_told_apart(vectors: Tensor) -> None:
    """A model that gave the same vector for everything would pass the others too."""
    assert torch.linalg.matrix_rank(vectors) > 30
