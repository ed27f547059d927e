"""Static embeddings in their three forms give the vectors of the packages that write them: sentence-transformers, model2vec, wordllama."""

import json
from pathlib import Path
from typing import Any

import model2vec
import numpy as np
import pytest
import torch
import wordllama
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer

from models.checkpoints.published import Checkpoint, load_checkpoint
from models.checkpoints.static import LONGEST, without_special_tokens
from models.folders.folder import CheckpointError
from tests.checkpoints import VOCABULARY, tiny_tokenizer

ROUNDED = 1e-6  # float32, a mean of a few numbers

V, D = len(VOCABULARY), 6
TEXTS = ["the cat", "a dog and a cat in the house", "paris!", "a ☃ in paris", "w"]  # the snowman is unknown


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(checkpoint: Checkpoint, texts: list[str]) -> torch.Tensor:
    """Of all texts at once, tokenised as the exported bundle does it; normalised if the checkpoint says so."""
    tokenizer = Tokenizer.from_str(without_special_tokens(checkpoint.tokenizer_file))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(texts)
    ids, mask = (torch.tensor([getattr(each, name) for each in encoded]) for name in ("ids", "attention_mask"))
    with torch.no_grad():
        out = checkpoint.model(ids, mask)
    assert torch.equal(out.token_embeddings[mask == 0], torch.zeros(int((mask == 0).sum()), out.token_embeddings.shape[2]))
    return out.embedding if checkpoint.normalized else out.pooled


def of_model2vec(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "architectures": ["StaticModel"], **config}))
    return folder


@pytest.mark.parametrize("normalized", [True, False])
def test_a_folder_of_sentence_transformers(tmp_path: Path, normalized: bool) -> None:
    """Also with an unknown token, which counts, and without special tokens, which its tokenizer would add."""
    modules = [StaticEmbedding(tiny_tokenizer(), embedding_weights=drawn(V, D)), *[Normalize()] * normalized]
    theirs = SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "static"))
    loaded = load_checkpoint(tmp_path / "static")
    assert (loaded.kind, loaded.pooling, loaded.normalized, loaded.max_tokens) == ("encoder", "mean", normalized, LONGEST)
    assert np.abs(vectors(loaded, TEXTS).numpy() - theirs.encode(TEXTS)).max() <= ROUNDED


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"embeddings": drawn(V, D)}, {"normalize": True}),
        ({"embeddings": drawn(V, D).half()}, {"normalize": False, "max_length": None}),
        ({"embeddings": drawn(V, D), "weights": drawn(V, seed=1).abs().double()}, {"normalize": True, "max_length": 64}),
        (
            {"embeddings": drawn(9, D), "mapping": torch.arange(V) * 5 % 9, "weights": drawn(V, seed=1).abs()},
            {"normalize": True, "vocabulary_quantization": 9},
        ),
        ({"embeddings": drawn(9, D), "mapping": torch.arange(V) * 5 % 9}, {}),
    ],
    ids=["vectors", "halves", "weights", "mapping-weights", "mapping"],
)
def test_a_folder_of_model2vec(tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Unknown tokens do not count."""
    folder = of_model2vec(tmp_path / "static", tensors, **config)
    theirs = model2vec.StaticModel.from_pretrained(folder).encode(TEXTS).astype(np.float32)
    loaded = load_checkpoint(folder)
    assert loaded.normalized == config.get("normalize", False)
    assert loaded.max_tokens == (config["max_length"] or LONGEST if "max_length" in config else 512)
    tolerance = 1e-3 if tensors["embeddings"].dtype == torch.float16 else ROUNDED  # model2vec computes the mean in the table's type
    assert np.abs(vectors(loaded, TEXTS).numpy() - theirs).max() <= tolerance


def test_a_text_of_unknown_tokens_has_their_vector(tmp_path: Path) -> None:
    """model2vec gives zeros, which have no direction."""
    table = drawn(V, D)
    loaded = load_checkpoint(of_model2vec(tmp_path / "static", {"embeddings": table}))
    assert (
        vectors(loaded, ["☃", "☃ ☃", "cat ☃"]) - table[[VOCABULARY.index(word) for word in ("[UNK]", "[UNK]", "cat")]]
    ).abs().max() < ROUNDED


def test_the_folder_of_wordllama() -> None:
    folder = Path(wordllama.__file__).parent
    theirs = wordllama.WordLlama.load(cache_dir=folder, disable_download=True).embed(["the cat", "a river in Berlin, ☃", "x"])
    loaded = load_checkpoint(folder)
    assert (loaded.config.vocab_size, loaded.config.d_model, loaded.normalized) == (32_000, 256, False)
    assert np.abs(vectors(loaded, ["the cat", "a river in Berlin, ☃", "x"]).numpy() - theirs).max() <= ROUNDED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mapping": torch.full((V,), 9)}, "mapping names row 9, but there are 9"),
        ({"mapping": torch.full((V,), -1)}, "mapping names row -1"),
        ({"mapping": torch.ones(V)}, "mapping has the type torch.float32"),
        ({"mapping": torch.ones(V, 2, dtype=torch.int64)}, r"mapping has the shape \(\d+, 2\)"),
        ({"mapping": torch.zeros(V - 1, dtype=torch.int64)}, rf"has {V} tokens, but .* vectors for {V - 1}"),
        ({"weights": torch.ones(3)}, r"weights has the shape \(3,\)"),
        ({"embeddings": torch.ones(9)}, r"embeddings has the shape \(9,\)"),
        ({"embeddings": torch.ones(0, 4)}, r"embeddings has the shape \(0, 4\)"),
        ({"linear.weight": torch.ones(4, 4)}, r"has embeddings, linear.weight, mapping, but a static embedding has"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, torch.Tensor], said: str) -> None:
    tensors = {"embeddings": drawn(9, D), "mapping": torch.zeros(V, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(of_model2vec(tmp_path / "static", tensors | change))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_length": "x"}, "max_length='x' is not accepted"),
        ({"max_length": 0}, "max_length=0 is not accepted"),
        ({"normalize": 1}, "normalize=1 is not accepted"),
    ],
)
def test_settings_are_checked(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    folder = of_model2vec(tmp_path / "static", {"embeddings": drawn(V, D)}, **config)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(folder)


def test_other_modules_than_a_table_needs_are_refused(tmp_path: Path) -> None:
    folder = of_model2vec(tmp_path / "static", {"embeddings": drawn(V, D)})
    (folder / "config.json").unlink()
    kinds = ("StaticEmbedding", "Pooling")
    modules = [{"idx": i, "name": str(i), "path": "", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="the order StaticEmbedding, Pooling is not supported"):
        load_checkpoint(folder)
    (folder / "modules.json").write_text(json.dumps(modules[:1]))
    assert load_checkpoint(folder).kind == "encoder"
    with pytest.raises(CheckpointError, match="attention='linear' cannot be given to static embeddings"):
        load_checkpoint(folder, attention="linear")


def test_two_tables_of_wordllama_need_a_choice(tmp_path: Path) -> None:
    source = Path(wordllama.__file__).parent
    for name in ("weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(source / name)
    (tmp_path / "weights" / "other.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 2 files of weights and 1 tokenizers; keep one of each"):
        load_checkpoint(tmp_path)
