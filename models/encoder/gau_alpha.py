"""GAU-α: an encoder built from gated attention units only. Neither its projections nor its norms have a bias, and its norms
have no weight.

x = norm(tokens + token types);   24 times:  x = norm(x + unit(x)),   norm(x) = x / sqrt(mean x² + eps)
Su et al. 2022, "GAU-α: (FLASH) Transformer Quality in Linear Time, a first look", technical report, and the code of bert4keras. The
units normalise attention scores by `softmax_plus`, which scales them by the logarithm of the length. The only positions are rotary.
Two units have as many weights as one block of BERT.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.attention.gated.gau import GatedAttentionUnit
from models.parts.positions import RotationTable


@dataclass(frozen=True, kw_only=True)
class GauAlphaConfig:
    """The shape of a GAU-α model. The defaults are those of the base model. Raises ValueError, with the value, if a field is invalid."""

    vocab_size: int
    d_model: int = 768
    n_layers: int = 24
    d_key: int = 128  # width of queries and keys, called s in the papers
    expansion: int = 2  # the width of values and gates is e = expansion * d_model, which is 1,536 by default
    n_token_types: int = 2
    n_positions: int = 512  # longest input in tokens
    least_length: int = 1  # softmax_plus computes its scale as if shorter inputs had this length; 16 in later releases
    rotary_base: float = 10_000.0
    rotary_interleaved: bool = True  # True: columns 2i and 2i + 1 are rotated together, as in bert4keras; False: columns i and i + s/2
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "d_key", "expansion", "n_positions", "least_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_token_types < 0:
            raise ValueError(f"n_token_types={self.n_token_types} must be at least 0")


class GauAlpha(nn.Module):
    """An encoder with the interface of `Encoder`, from token ids to token vectors. Weights are initialised from N(0, 0.02)."""

    def __init__(self, config: GauAlphaConfig, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = c = config
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.token_types = nn.Embedding(c.n_token_types, c.d_model) if c.n_token_types else None
        self.rotations = RotationTable(c.n_positions, c.d_key, base=c.rotary_base, dtype=dtype)
        self.units = nn.ModuleList(_unit(c) for _ in range(c.n_layers))
        self.apply(_draw_weights)
        self.to(dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Compute the token vectors (B, N, D). Each argument is (B, N) int64. attention_mask is 1 for a token and 0 for padding. The
        vectors of padding are undefined.

        Raises ValueError for N > n_positions.
        """
        n, limit = input_ids.shape[1], self.config.n_positions
        if not torch.compiler.is_exporting() and n > limit:
            raise ValueError(f"N={n} tokens, but the model has n_positions={limit}; cut the input")
        key_mask = attention_mask != 0
        rotation = self.rotations(torch.arange(n, device=input_ids.device))
        x = self.tokens(input_ids)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_type_ids is None else self.token_types(token_type_ids))
        x = self._norm(x)
        for unit in self.units:
            x = self._norm(x + unit(x, key_mask, rotation=rotation))
        return x

    def _norm(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], eps=self.config.norm_eps)


def _unit(c: GauAlphaConfig) -> GatedAttentionUnit:
    return GatedAttentionUnit(
        c.d_model,
        1,
        d_head=c.d_key,
        bias=False,
        expansion=c.expansion,
        normalisation="softmax_plus",
        relative_bias=False,
        least_length=c.least_length,
        interleaved=c.rotary_interleaved,
    )


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
