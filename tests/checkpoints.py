"""Small random BERT checkpoints, as a training run writes them: weights, tokenizer and settings."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.wordpiece import wordpiece

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "a", "of", "to", "and", "in", "is", "cat", "dog", "river", "stone", "house", "paris", "berlin", "capital", "password")
LETTERS = "abcdefghijklmnopqrstuvwxyzäöüßéñ0123456789" + "日本語русский"
MARKS = "!\"#$%&'()*+,-./:;<=>?@[]^_{|}~"
VOCABULARY = tuple(dict.fromkeys([*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *MARKS]))

D, N_LAYERS, N_HEADS, D_FEEDFORWARD, MAX_TOKENS = 48, 3, 4, 96, 64


def tiny_tokenizer() -> Tokenizer:
    """Over a few words and single letters."""
    return wordpiece(VOCABULARY, SPECIAL)


def tiny_encoder(folder: Path, *, pooling: str = "mean", seed: int = 0) -> Path:
    """A sentence encoder, D = 48, 64 tokens; `pooling` as sentence-transformers names it: mean, cls, max."""
    _write(folder, "BertModel", _bert(seed), {})
    kinds = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    modules = [{"idx": int(i), "name": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, path, kind in kinds]
    modes = ("cls_token", "mean_tokens", "max_tokens")
    _json(folder / "modules.json", modules)
    _json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    _json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": D, **{f"pooling_mode_{mode}": mode.startswith(pooling) for mode in modes}},
    )
    _json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": None},
    )
    return folder


def tiny_classifier(folder: Path, *, n_labels: int = 3, per_token: bool = False, seed: int = 0) -> Path:
    """Scores for a text; with one label for a pair of texts (a reranker), with `per_token` for each token."""
    tensors = {f"bert.{name}": tensor for name, tensor in _bert(seed).items()}
    random = torch.Generator().manual_seed(seed + 1)
    tensors["classifier.weight"] = torch.randn(n_labels, D, generator=random)
    tensors["classifier.bias"] = torch.randn(n_labels, generator=random)
    if per_token:
        tensors = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    labels = {"id2label": {str(i): name for i, name in enumerate(("negative", "neutral", "positive", "mixed")[:n_labels])}}
    return _write(folder, "BertForTokenClassification" if per_token else "BertForSequenceClassification", tensors, labels)


def _write(folder: Path, architecture: str, tensors: dict[str, torch.Tensor], more: dict[str, object]) -> Path:
    config = {
        "architectures": [architecture],
        "model_type": "bert",
        "vocab_size": len(VOCABULARY),
        "hidden_size": D,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "intermediate_size": D_FEEDFORWARD,
        "hidden_act": "gelu",
        "max_position_embeddings": MAX_TOKENS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        **more,
    }
    _json(folder / "config.json", config)
    _json(folder / "tokenizer_config.json", {"model_max_length": MAX_TOKENS})
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _bert(seed: int) -> dict[str, torch.Tensor]:
    """Weights as large as trained ones, so that attention is not uniform and errors show."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, d_in: int, d_out: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(d_out, d_in, generator=random) * 1.5 * d_in**-0.5
        tensors[f"{name}.bias"] = torch.randn(d_out, generator=random) * 0.1

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + torch.randn(D, generator=random) * 0.1
        tensors[f"{name}.bias"] = torch.randn(D, generator=random) * 0.1

    for name, rows in (("word", len(VOCABULARY)), ("position", MAX_TOKENS), ("token_type", 2)):
        tensors[f"embeddings.{name}_embeddings.weight"] = torch.randn(rows, D, generator=random) * 0.5
    norm("embeddings.LayerNorm")
    for layer in (f"encoder.layer.{i}" for i in range(N_LAYERS)):
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", D, D)
        linear(f"{layer}.attention.output.dense", D, D)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", D, D_FEEDFORWARD)
        linear(f"{layer}.output.dense", D_FEEDFORWARD, D)
        norm(f"{layer}.output.LayerNorm")
    linear("pooler.dense", D, D)
    return tensors


def _json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
