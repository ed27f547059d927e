"""Small random models of every form that has a graph for GPUs. `python -m tests.export.gpu.variants FOLDER` writes their graphs, which
`python -m export.gpu.kernels` shows to the CUDA provider.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from export import contract
from export.gpu.packed_encoder import SIZES as ENCODER_SIZES
from export.gpu.packed_encoder import PackedModel
from export.graphs.torch_graph import TorchGraph
from models.encoder.heads import Dense, SentenceEncoder, SequenceClassifier
from models.encoder.model import Encoder, EncoderConfig
from models.parts.feedforward import ACTIVATIONS

D, VOCABULARY, MAX_TOKENS = 16, 64, 24
SMALL = {"vocab_size": VOCABULARY, "d_model": D, "n_layers": 2, "n_heads": 2, "d_feedforward": 24, "n_positions": MAX_TOKENS}

ENCODERS: dict[str, dict[str, object]] = {
    "bert": {"n_token_types": 2},
    "roberta": {"position_padding_id": 1},
    "rotary": {"positions": "rotary", "norm": "pre", "final_norm": True, "gated": True, "activation": "silu", "attention_bias": False},
    "sinusoidal": {"positions": "sinusoidal", "norm_bias": False, "feedforward_bias": False},
    **{name: {"activation": name} for name in ACTIVATIONS},
}


def random_encoder(name: str) -> SentenceEncoder:
    """A sentence encoder whose weights are so large that every part of it shows in its vectors."""
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**SMALL | ENCODERS[name]))
    _enlarge(encoder)
    return SentenceEncoder(encoder, pooling="mean", dense=(Dense(D, 12),) if name == "bert" else ()).eval()


def random_classifier() -> SequenceClassifier:
    """A reranker of pairs of texts, which reads the first token."""
    torch.manual_seed(0)
    classifier = SequenceClassifier(Encoder(EncoderConfig(**SMALL, n_token_types=2)), n_labels=1, pooling="cls", transform=Dense(D, D))
    _enlarge(classifier)
    return classifier.eval()


def encoder_graph(model: SentenceEncoder | SequenceClassifier) -> TorchGraph:
    """The graph for GPUs of a random model."""
    kind: contract.Kind = "reranker" if isinstance(model, SequenceClassifier) else "encoder"
    widths = [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)]
    width = widths[-1] if kind == "reranker" or getattr(model, "dense", ()) else D
    return TorchGraph(PackedModel(model), *contract.packed_interface(kind, width, typed=kind == "reranker"), ENCODER_SIZES)


def _enlarge(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def write(folder: Path) -> list[Path]:
    """Write the graphs of all forms, in both precisions."""
    files = []
    for dtype in (torch.float32, torch.float16):
        models = {**{name: random_encoder(name) for name in ENCODERS}, "classifier": random_classifier()}
        for name, model in models.items():
            files.append(file := folder / f"{name}-{str(dtype).removeprefix('torch.')}" / "gpu.onnx")
            file.parent.mkdir(parents=True)
            encoder_graph(model.to(dtype)).export(file, weights_beside=True)
    return files


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])))
