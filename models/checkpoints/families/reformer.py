"""Reads a Reformer from a folder with `config.json` and safetensors weights. The service uses only its encoder.

Checkpoints do not contain the random rotations of the LSH attention. If config.json has a `hash_seed`, they are drawn from this seed as
in `transformers`, otherwise from the default seed of `LSHAttention`. Any seed is valid, because the model was trained with new rotations
in every step.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.attention.sparse.lsh import LSHAttention
from models.checkpoints.families.family import ACTIVATION_NAMES
from models.checkpoints.weights import check_names, copy_rows
from models.folders.folder import JsonSettings, errors_of, read_settings, read_tensors
from models.reformer.model import ChunkSpan, Reformer, ReformerConfig

WITH_LOGITS = ("ReformerModelWithLMHead", "ReformerForMaskedLM")
ARCHITECTURES = ("ReformerModel", *WITH_LOGITS)
HEADS = ("lm_head.", "classifier.", "qa_outputs.")  # prefixes of heads, ignored if only the encoder is read

NAMES = {"embeddings.word_embeddings": "tokens", "encoder.layer_norm": "norm"}
NAMES_OF_BLOCKS = {
    "attention.layer_norm": "F.norm",
    "attention.output.dense": "F.layer.to_out",
    "attention.self_attention.value": "F.layer.to_v",
    "feed_forward.layer_norm": "G.norm",
    "feed_forward.dense.dense": "G.layer.up",
    "feed_forward.output.dense": "G.layer.down",
}
NAMES_OF_QUERIES = {
    "lsh": {"attention.self_attention.query_key": "F.layer.to_q"},
    "local": {"attention.self_attention.query": "F.layer.to_q", "attention.self_attention.key": "F.layer.to_k"},
}


@dataclass(frozen=True, kw_only=True)
class ReformerShape:
    """The config of a `ReformerEncoder`."""

    vocab_size: int
    d_model: int  # width of the token vectors, which is twice `ReformerConfig.d_model`, as both streams of the blocks are joined
    n_positions: int
    attention: str = "lsh"


class ReformerEncoder(nn.Module):
    """A Reformer with the interface of `Encoder`. If its blocks are causal, a token's vector depends on earlier tokens only."""

    def __init__(self, reformer: Reformer) -> None:
        super().__init__()
        self.reformer = reformer
        c = reformer.config
        self.config = ReformerShape(vocab_size=c.vocab_size, d_model=2 * c.d_model, n_positions=c.n_positions)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self.reformer(input_ids, attention_mask)


def load_reformer(folder: Path, *, dtype: torch.dtype = torch.float32, logits: bool = True) -> Reformer:
    """Load a Reformer in eval mode. The model computes logits if `logits` is True and the checkpoint is a language model, otherwise
    token vectors.

    Raises CheckpointError if the folder is unsupported.
    """
    settings = read_settings(Path(folder) / "config.json")
    settings.allow("model_type", "reformer")
    with errors_of(settings.file):
        config = _config(settings, logits)
    model = Reformer(config).to(dtype).eval()
    _fill(model, Path(folder))
    if (seed := settings.get("hash_seed", None)) is not None:
        for module in model.modules():
            if isinstance(module, LSHAttention):
                _draw_rotations(module, seed)
    return model


def _config(settings: JsonSettings, logits: bool) -> ReformerConfig:
    axial = settings.get("axial_pos_embds", True)
    buckets = settings.need("num_buckets")
    return ReformerConfig(
        vocab_size=settings.need("vocab_size"),
        d_model=settings.need("hidden_size"),
        n_heads=settings.need("num_attention_heads"),
        d_head=settings.need("attention_head_size"),
        d_feedforward=settings.need("feed_forward_size"),
        n_positions=settings.need("max_position_embeddings"),
        layers=tuple(settings.need("attn_layers")),
        axial_shape=tuple(settings.need("axial_pos_shape")) if axial else None,
        axial_widths=tuple(settings.need("axial_pos_embds_dim")) if axial else None,
        lsh_chunks=_chunks(settings, "lsh"),
        local_chunks=_chunks(settings, "local"),
        n_rounds=settings.get("num_hashes", 1),
        n_buckets=buckets if isinstance(buckets, int) else tuple(buckets),
        causal=settings.get("is_decoder", False),
        n_logits=settings.need("vocab_size") if logits and settings.need("architectures")[0] in WITH_LOGITS else 0,
        activation=settings.pick("hidden_act", "relu", ACTIVATION_NAMES),
        norm_eps=settings.get("layer_norm_eps", 1e-12),
    )


def _chunks(settings: JsonSettings, kind: str) -> ChunkSpan:
    return ChunkSpan(
        length=settings.get(f"{kind}_attn_chunk_length", 64),
        before=settings.get(f"{kind}_num_chunks_before", 1),
        after=settings.get(f"{kind}_num_chunks_after", 0),
    )


def _fill(model: Reformer, folder: Path) -> None:
    """Copy the tensors of the checkpoint in `folder` into the model, cast to the model's dtype. Raises CheckpointError if a tensor is
    missing, unexpected or of another shape.
    """
    config, tensors = model.config, read_tensors(folder)
    prefix = "reformer." if any(name.startswith("reformer.") for name in tensors) else ""
    modules = dict(NAMES)
    for i, kind in enumerate(config.layers):
        names = NAMES_OF_BLOCKS | NAMES_OF_QUERIES[kind]
        modules |= {f"encoder.layers.{i}.{theirs}": f"blocks.blocks.{i}.{ours}" for theirs, ours in names.items()}
    names = {f"{prefix}{theirs}.{part}": f"{ours}.{part}" for theirs, ours in modules.items() for part in ("weight", "bias")}
    if config.axial_shape is None:
        names[f"{prefix}embeddings.position_embeddings.embedding.weight"] = "positions.0.weight"
    else:
        names |= {f"{prefix}embeddings.position_embeddings.weights.{axis}": f"positions.{axis}.weight" for axis in (0, 1)}
    names |= {"lm_head.decoder.weight": "head.weight", "lm_head.bias": "head.bias"}
    places = model.state_dict()  # these tensors share memory with the model
    names = {theirs: ours for theirs, ours in names.items() if ours in places}
    check_names({theirs: [ours] for theirs, ours in names.items()}, tensors, harmless=HEADS)
    for theirs, ours in names.items():
        tensor = tensors[theirs]
        if ours.startswith("positions.") and tensor.dim() == 3:  # the two axial tables have the shapes (n_1, 1, D_1) and (1, n_2, D_2)
            tensor = tensor.flatten(0, 1)
        copy_rows(tensor, [places[ours]], theirs)


def _draw_rotations(layer: LSHAttention, seed: int) -> None:
    """Draw the rotations as transformers does: in the shape (H, D_k, R, columns), in the model's dtype, and with the same seed in every
    layer.
    """
    H, R, D_k, columns = layer.rotations.shape
    drawn = torch.randn(H, D_k, R, columns, generator=torch.Generator().manual_seed(seed), dtype=layer.rotations.dtype)
    layer.rotations.copy_(drawn.transpose(1, 2))
