"""The encoder: embeddings, then blocks of attention and a feed-forward layer.

Post-norm (Vaswani et al. 2017; BERT):  x = norm(x + attention(x));  x = norm(x + feedforward(x))
Pre-norm (ModernBERT):                  x = x + attention(norm(x));  x = x + feedforward(norm(x))
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.causal import CausalLayer
from models.attention.layers.mechanism import Mechanism
from models.layers import LAYERS
from models.parts.feedforward import ACTIVATIONS, FeedForward
from models.parts.modules import Modules
from models.parts.positions import RelativeBias, Rotation, RotationTable, positions_after_padding, sinusoids


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The hyperparameters of an encoder. Raises ValueError, with the values, if they are invalid or do not fit together."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    d_feedforward: int  # 0: blocks without feed-forward layers, as in a model of gated attention units
    n_positions: int  # longest input in tokens, whatever `positions` is
    d_head: int | None = None  # None: d_model / n_heads
    d_embedding: int | None = None  # width of the embeddings, which a linear layer then maps to d_model; None: d_model, without that layer
    attention: str = "softmax"  # name of a non-causal layer in LAYERS
    attention_options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the layer's constructor
    attention_bias: bool = True
    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    position_padding_id: int | None = None  # if set, positions start at this id + 1 and skip tokens of this id (RoBERTa); None: start at 0
    rotary_base: float = 10_000.0
    local_rotary_base: float | None = None  # rotary base of layers with a window; None: rotary_base
    windows: tuple[int | None, ...] = ()  # per layer: largest distance of tokens that attend to each other; None or (): no limit
    n_relative_buckets: int = 0  # 0: no relative position bias
    n_token_types: int = 0
    embedding_scale: float = 1.0  # the tokens' embeddings are multiplied by this
    embedding_norm: bool = True
    norm: Literal["post", "pre"] = "post"
    norm_eps: float = 1e-12
    norm_bias: bool = True
    final_norm: bool = False
    activation: str = "gelu"
    gated: bool = False
    feedforward_bias: bool = True
    shared_layers: bool = False  # True: all layers have the weights of one block (ALBERT)

    def __post_init__(self) -> None:
        for name, least in {"vocab_size": 1, "d_model": 1, "n_layers": 1, "n_heads": 1, "d_feedforward": 0, "n_positions": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.d_embedding is not None and self.d_embedding < 1:
            raise ValueError(f"d_embedding={self.d_embedding} must be at least 1")
        seeing_both_ways = [name for name, layer in LAYERS.items() if not issubclass(layer, CausalLayer)]
        if self.attention not in seeing_both_ways:
            raise ValueError(f"attention={self.attention!r} is not one of {', '.join(seeing_both_ways)}")
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.positions not in ("learned", "sinusoidal", "rotary", "none"):
            raise ValueError(f"positions={self.positions!r} is not one of learned, sinusoidal, rotary, none")
        if self.norm not in ("post", "pre"):
            raise ValueError(f"norm={self.norm!r} is not one of post, pre")
        if self.windows and len(self.windows) != self.n_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for n_layers={self.n_layers}")
        if self.shared_layers and (self.windows or self.norm == "pre"):
            raise ValueError("shared_layers needs norm='post' and no windows, with which layers differ from each other")
        if self.position_padding_id is not None and self.positions != "learned":
            raise ValueError(f"position_padding_id={self.position_padding_id} needs learned positions, not {self.positions!r}")
        self._check_attention()

    def _check_attention(self) -> None:
        layer: Any = LAYERS[self.attention]
        can = layer.capabilities
        impossible = {
            "rotary positions": self.positions == "rotary" and not can.rotates,
            "a relative position bias": self.n_relative_buckets > 0 and not can.pairs,
            "local windows": any(window is not None for window in self.windows) and not can.pairs,
        }
        if found := [name for name, present in impossible.items() if present]:
            raise ValueError(f"attention={self.attention!r} does not support {' or '.join(found)}, which act on single pairs of tokens")
        known = inspect.signature(layer).parameters.keys() - {"d_model", "n_heads", "d_head", "bias"}
        if unknown := sorted(self.attention_options.keys() - known):
            raise ValueError(
                f"attention_options of {self.attention} has {unknown[0]!r}, which is not one of {', '.join(sorted(known)) or 'none'}"
            )

    @property
    def n_position_rows(self) -> int:
        """Number of rows of the position table, including the unused rows up to the padding id, if there is one."""
        return self.n_positions + (0 if self.position_padding_id is None else self.position_padding_id + 1)


class Encoder(nn.Module):
    """An encoder from token ids to token vectors. Weights are initialised from N(0, 0.02) and biases with 0, as in BERT."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = c = config
        self.embeddings = Embeddings(c, dtype=dtype)
        self.rotations = _rotations(c, dtype)
        self.relative_bias = None
        if c.n_relative_buckets:
            self.relative_bias = RelativeBias(c.n_positions, c.n_heads, n_buckets=c.n_relative_buckets)
        own = [EncoderBlock(c, layer) for layer in range(1 if c.shared_layers else c.n_layers)]
        for block in own[1:]:
            for name in LAYERS[c.attention].shared:
                setattr(block.attention, name, own[0].attention.get_submodule(name))
        self.blocks: Modules[EncoderBlock] = Modules(own * c.n_layers if c.shared_layers else own)
        self.final_norm = _norm(c) if c.final_norm else nn.Identity()
        self.apply(_draw_weights)
        self.to(dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Compute the token vectors (B, N, D). Each argument is (B, N) int64. attention_mask is 1 for a token, 0 for padding, and 2 for a
        token to which no token attends. The vectors of padding are undefined.

        Raises ValueError for N > n_positions.
        """
        if not torch.compiler.is_exporting() and input_ids.shape[1] > self.config.n_positions:
            limit = self.config.n_positions
            raise ValueError(f"N={input_ids.shape[1]} tokens, but the model has n_positions={limit}; cut the input")
        key_mask = attention_mask == 1
        t = torch.arange(input_ids.shape[1], device=input_ids.device)
        rotations = {name: table(t) for name, table in self.rotations.items()}
        gaps = (t[None, :] - t[:, None]).abs()  # (N, N)
        near = {window: gaps <= window for window in set(self.config.windows) if window is not None}
        bias = None if self.relative_bias is None else self.relative_bias(t)
        x = self.embeddings(input_ids, t, token_type_ids)
        for block in self.blocks:
            rotation, pair_mask = rotations.get(block.reach), None if block.window is None else near[block.window]
            x = block(x, key_mask, rotation=rotation, pair_mask=pair_mask, pair_bias=bias)
        return self.final_norm(x)


class Embeddings(nn.Module):
    """The input embeddings: the normalised sum of a token's embedding, its position's embedding and its token type's embedding.

    Embeddings narrower than the model are mapped to its width by a linear layer (Lan et al. 2019, arXiv:1909.11942, section 3.1).
    """

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        c = config
        self.padding_id, self.scale = c.position_padding_id, c.embedding_scale
        width = c.d_embedding or c.d_model
        self.tokens = nn.Embedding(c.vocab_size, width)
        self.positions = nn.Embedding(c.n_position_rows, width) if c.positions == "learned" else None
        self.token_types = nn.Embedding(c.n_token_types, width) if c.n_token_types else None
        self.norm = nn.LayerNorm(width, eps=c.norm_eps, bias=c.norm_bias) if c.embedding_norm else nn.Identity()
        self.project = nn.Identity() if c.d_embedding is None else nn.Linear(width, c.d_model)
        waves = sinusoids(c.n_positions, width).to(dtype) if c.positions == "sinusoidal" else None
        self.waves: Tensor | None
        self.register_buffer("waves", waves, persistent=False)  # (N_max, D)

    def forward(self, input_ids: Tensor, t: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Compute the input vectors: ids (B, N), positions (N,), token types (B, N) or None for all 0 -> (B, N, D)."""
        x = self.tokens(input_ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_type_ids is None else self.token_types(token_type_ids))
        if self.positions is not None:
            rows = t if self.padding_id is None else positions_after_padding(input_ids, self.padding_id)
            x = x + self.positions(rows)
        if self.waves is not None:
            x = x + F.embedding(t, self.waves)
        return self.project(self.norm(x))


class EncoderBlock(nn.Module):
    """One block of the encoder, attention and a feed-forward layer: (B, N, D) -> (B, N, D)."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.pre_norm = c.norm == "pre"
        self.window = c.windows[layer] if c.windows else None
        self.reach = "full" if self.window is None else "local"
        self.attention: nn.Module = LAYERS[c.attention](c.d_model, c.n_heads, d_head=c.d_head, bias=c.attention_bias, **c.attention_options)
        # A pre-norm model with normalised embeddings needs no norm before its first attention (ModernBERT).
        skip = self.pre_norm and c.embedding_norm and layer == 0
        self.attention_norm = nn.Identity() if skip else _norm(c)
        self.feedforward: FeedForward | None = None
        if c.d_feedforward:
            self.feedforward = FeedForward(c.d_model, c.d_feedforward, activation=c.activation, gated=c.gated, bias=c.feedforward_bias)
            self.feedforward_norm = _norm(c)

    def forward(
        self, x: Tensor, key_mask: Tensor, *, rotation: Rotation | None, pair_mask: Tensor | None, pair_bias: Tensor | None
    ) -> Tensor:
        """Compute the block's output (B, N, D) from x (B, N, D). The other arguments are those of `SoftmaxAttention.forward`."""
        seen = self.attention_norm(x) if self.pre_norm else x
        attended = self.attention(seen, key_mask, rotation=rotation, pair_mask=pair_mask, pair_bias=pair_bias)
        return self.apply_feedforward(x + attended if self.pre_norm else self.attention_norm(x + attended))

    def apply_feedforward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward sublayer, with its norm and residual sum, to each token on its own: (.., D) -> (.., D)."""
        if self.feedforward is None:
            return x
        if self.pre_norm:
            return x + self.feedforward(self.feedforward_norm(x))
        return self.feedforward_norm(x + self.feedforward(x))


def _rotations(c: EncoderConfig, dtype: torch.dtype) -> nn.ModuleDict:
    """Return the rotation tables of the "full" layers and of the "local" layers, which attend within a window and may have a lower
    rotary base. Return no tables if positions are not rotary.
    """
    if c.positions != "rotary":
        return nn.ModuleDict()
    d_head = c.d_head or c.d_model // c.n_heads
    bases = {"full": c.rotary_base, "local": c.local_rotary_base or c.rotary_base}
    tables = {reach: RotationTable(c.n_positions, d_head, base=base, dtype=dtype) for reach, base in bases.items()}
    return nn.ModuleDict(tables)


def _norm(c: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(c.d_model, eps=c.norm_eps, bias=c.norm_bias)


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding | RelativeBias):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, Mechanism):
        module.begin()
