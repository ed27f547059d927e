"""A real checkpoint, all-MiniLM-L6-v2, gives the vectors that its users know."""

from pathlib import Path

import pytest
import torch
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


def test_sentence_vectors_equal_sentence_transformers(minilm: Path, vectors: Tensor) -> None:
    """More than 40 texts, of 0 to 600 words, in 16 scripts, with emoji, control characters and nothing at all."""
    import sentence_transformers as library

    ordered = sorted(SAMPLE, key=len)
    assert len(ordered) > 40
    theirs = library.SentenceTransformer(str(minilm), device="cpu").encode(ordered, convert_to_tensor=True, batch_size=BATCH)
    cosines = (vectors * theirs).sum(1)
    assert (vectors.norm(dim=1) - 1).abs().max() <= ROUNDED
    assert cosines.min() >= SAME_VECTOR
