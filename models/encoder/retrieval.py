"""Heads of an encoder for search, which make sparse vectors and one vector for each token from its token vectors."""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 2_048  # columns of the vocabulary whose logits are in memory at once


class Splade(nn.Module):
    """Sparse vectors by the head of a masked language model: (B, N, D) -> (B, V), none below 0.

    w_j = max_i log(1 + relu(logit_ij)), or the sum over i, where i are the tokens of a text. Formal et al. 2021, arXiv:2107.05720 (sum) and
    2109.10086 (max). With `logs` = 2 the logarithm is applied twice (Geng et al. 2025, arXiv:2504.14839).
    """

    def __init__(self, transform: nn.Module, decoder: nn.Linear, *, pooling: Literal["max", "sum"] = "max", logs: int = 1) -> None:
        super().__init__()
        self.transform = transform
        self.decoder = decoder
        self.pooling, self.logs = pooling, logs

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Compute the weights. The mask (B, N) is True at tokens."""
        return torch.cat([self.pooled(logits * mask.unsqueeze(-1)) for logits in self.logits(x)], dim=1)

    def logits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits in blocks of the vocabulary: (.., D) -> (.., BLOCK)."""
        h = self.transform(x)
        for weight, bias in zip(self.decoder.weight.split(BLOCK), self.decoder.bias.split(BLOCK), strict=True):
            yield F.linear(h, weight, bias)

    def pooled(self, logits: Tensor, total: Callable[[Tensor], Tensor] = lambda x: x.sum(1)) -> Tensor:
        """Return the weights of a block from the logits of all tokens, 0 at padding: (B, N, BLOCK) -> (B, BLOCK). `total` sums over
        tokens.
        """
        return self._activated(logits.amax(1)) if self.pooling == "max" else total(self._activated(logits))

    def _activated(self, x: Tensor) -> Tensor:
        x = x.relu()
        for _ in range(self.logs):
            x = (x + 1).log()
        return x


class TokenWeights(nn.Module):
    """A weight for each token, none below 0, and 0 at padding: (B, N, D) -> (B, N). Chen et al. 2024, arXiv:2402.03216, section 3.1."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1).relu() * mask


class SparseCode(nn.Module):
    """The `k` largest of many learned features of a text's vector, without those below 0: (B, D) -> (B, D_code). Wen et al. 2025,
    arXiv:2503.01776.
    """

    def __init__(self, d_in: int, d_code: int, *, k: int, normalized: bool) -> None:
        super().__init__()
        self.pre_bias = nn.Parameter(torch.zeros(d_in))
        self.encoder = nn.Linear(d_in, d_code, bias=False)
        self.latent_bias = nn.Parameter(torch.zeros(d_code))
        self.k, self.normalized = k, normalized

    def forward(self, x: Tensor) -> Tensor:
        if self.normalized:
            x = x - x.mean(-1, keepdim=True)
            x = x / (x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)).sqrt().add(1e-5)
        features = F.linear(x - self.pre_bias, self.encoder.weight, self.latent_bias)
        largest, places = features.topk(self.k, dim=-1)
        return torch.zeros_like(features).scatter(-1, places, largest.relu())
