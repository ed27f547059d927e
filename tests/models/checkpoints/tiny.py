"""Small random checkpoints of every family, written to disk by `transformers` as a user's training run would write
them.
"""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn

from models.checkpoints.published import LANGUAGE_MODELS

V = 60  # vocabulary

BERT = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 50,
}
ALBERT = {**BERT, "num_hidden_layers": 3, "embedding_size": 10}
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
DISTILBERT = {"vocab_size": V, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 50}
MODERNBERT = {**BERT, "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def build(model_class: str, settings: dict, seed: int = 0) -> nn.Module:
    """A model of `transformers` in which no parameter is 0 or 1, so that a swapped or forgotten one shows."""
    torch.manual_seed(seed)
    cls = getattr(transformers, model_class)
    model = cls(cls.config_class(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.2)
    return model


def save(model: nn.Module, folder: Path, **options) -> Path:
    """`save_pretrained`, and a tokenizer beside it. Options as in `save_pretrained`. A language model gets a pooling, which makes it an
    encoder.
    """
    model.save_pretrained(folder, **options)
    save_tokenizer(folder)
    if type(model).__name__.endswith(LANGUAGE_MODELS):
        paths = {"Transformer": "", "Pooling": "Pooling"}
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in paths.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "Pooling").mkdir(exist_ok=True)
        (folder / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    return folder


def save_tokenizer(folder: Path) -> None:
    Tokenizer(WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0")).save(str(folder / "tokenizer.json"))


def batch(lengths: tuple[int, ...], *, pad_id: int, n_types: int = 1, seed: int = 1) -> dict[str, Tensor]:
    """Random tokens of the given lengths, padded on the right; token types where the model has more than one."""
    generator = torch.Generator().manual_seed(seed)
    N = max(lengths)
    mask = torch.arange(N)[None, :] < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, V, mask.shape, generator=generator)
    inputs = {"input_ids": torch.where(mask, ids, pad_id), "attention_mask": mask.long()}
    if n_types > 1:
        inputs["token_type_ids"] = torch.randint(0, n_types, mask.shape, generator=generator)
    return inputs
