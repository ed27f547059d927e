"""A codebook for vector quantisation: finds the code nearest to each key, and moves the codes towards the keys assigned to them.

z = argmin_s ||k - c_s||²,   k^ = k + sg(c_z - k)        sg: stop-gradient. k^ has the value c_z and the gradient of k
sums_s <- γ sums_s + (1 - γ) sum_{z_j = s} k_j,   counts_s <- γ counts_s + (1 - γ) |{j: z_j = s}|,   c_s = sums_s / max(counts_s, 0.01)
loss = mean ||k - sg(k^)||²                              the commitment loss, which keeps keys near their codes
van den Oord et al. 2017, arXiv:1711.00937, sec. 3 and app. A.1; Lingle 2023, arXiv:2309.16354, sec. 3.2. O(N Z D_k) time a head.

The forward pass changes no codebook. In each step a training loop must add `commitment_loss(model)` to its loss and call
`update_codebooks(model)`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DECAY = 0.99  # γ, the weight of the previous sums and counts
LEAST_COUNT = 0.01  # lower limit of a count; a code whose count is below it is unused
COMMITMENT = 1e-4


def nearest(k: Tensor, codebook: Tensor, *, products: Tensor | None = None) -> Tensor:
    """Return the index of the nearest code (the lowest in a tie): k (B, H, N, D_k), codebook (H, Z, D_k) -> int64 (B, H, N). products: k .
    c, if known.
    """
    products = k @ codebook.mT if products is None else products
    return (codebook.square().sum(-1).unsqueeze(-2) / 2 - products).argmin(-1)  # ||k||² is the same for all codes


def looked_up(codes: Tensor, codebook: Tensor) -> Tensor:
    """Return k^, the code vector of each index: codes int64 (B, H, N), codebook (H, Z, D_k) -> (B, H, N, D_k)."""
    heads = torch.arange(codebook.shape[0], device=codes.device)[:, None]  # (H, 1)
    return codebook[heads, codes]


def straight_through(k: Tensor, codes: Tensor, codebook: Tensor) -> Tensor:
    """Return the code vectors k^ (B, H, N, D_k) with the gradient of k: k (B, H, N, D_k), codes int64 (B, H, N), codebook (H, Z, D_k)."""
    return k + (looked_up(codes, codebook) - k).detach()


def commitment(k: Tensor, codes: Tensor, codebook: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Return the commitment loss: the mean of ||k - sg(k^)||² over heads and tokens. key_mask bool (B, N): True at tokens."""
    squares = (k - looked_up(codes, codebook).detach()).square().sum(-1)  # (B, H, N)
    is_token = torch.ones_like(squares) if key_mask is None else key_mask[:, None, :].expand_as(squares).to(squares.dtype)
    return (squares * is_token).sum() / is_token.sum().clamp_min(1)


def updated_sums(
    sums: Tensor, counts: Tensor, k: Tensor, codes: Tensor, *, key_mask: Tensor | None = None, decay: float = DECAY
) -> tuple[Tensor, Tensor]:
    """Return the moving sums (H, Z, D_k) and counts (H, Z) of the codes, updated with the keys k (B, H, N, D_k) and their codes (B, H, N).
    key_mask bool (B, N): True at tokens. decay: the weight of the previous ones.
    """
    one_hot = F.one_hot(codes, counts.shape[-1]).to(sums.dtype)  # (B, H, N, Z)
    if key_mask is not None:
        one_hot = one_hot * key_mask[:, None, :, None]
    new_sums = torch.einsum("bhnz,bhnd->hzd", one_hot, k.to(sums.dtype))
    return decay * sums + (1 - decay) * new_sums, decay * counts + (1 - decay) * one_hot.sum((0, 2))


def reseeded(
    sums: Tensor, counts: Tensor, k: Tensor, *, key_mask: Tensor | None = None, least: float = LEAST_COUNT, drawn: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Replace each code whose count is below `least` by a key of the batch, with a count of 1. Returns the new sums and counts. drawn:
    int64 (H, Z), for each code the index of the token whose key would replace it, counted without padding; None: of T tokens, code s takes
    token floor(s T / Z), so that a resumed training gives the same bits.
    """
    is_token = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    k = k.transpose(1, 2)[is_token].transpose(0, 1)  # (H, tokens, D_k)
    if k.shape[1] == 0:
        return sums, counts
    if drawn is None:
        H, Z = counts.shape
        drawn = (torch.arange(Z, device=k.device) * k.shape[1] // Z).expand(H, Z)
    dead = counts < least
    fresh = looked_up(drawn[None], k)[0].to(sums.dtype)
    return torch.where(dead.unsqueeze(-1), fresh, sums), torch.where(dead, 1.0, counts)


def codes_of(sums: Tensor, counts: Tensor, *, least: float = LEAST_COUNT) -> Tensor:
    """Return the codes c = sums / max(counts, least): sums (H, Z, D_k), counts (H, Z) -> c (H, Z, D_k)."""
    return sums / counts.clamp_min(least).unsqueeze(-1)


class Codebook(nn.Module):
    """The codes of H heads. Initially they are drawn from N(0, 1), so they are about as long as layer-normalised keys."""

    sums: Tensor
    counts: Tensor

    def __init__(self, n_heads: int, n_codes: int, d_head: int, *, seed: int = 0) -> None:
        super().__init__()
        if n_codes < 1:
            raise ValueError(f"n_codes={n_codes} must be at least 1")
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("sums", torch.randn(n_heads, n_codes, d_head, generator=generator))
        self.register_buffer("counts", torch.ones(n_heads, n_codes))
        self.forget()

    @property
    def codes(self) -> Tensor:
        """The code vectors c, (H, Z, D_k)."""
        return codes_of(self.sums, self.counts)

    def products(self, x: Tensor) -> Tensor:
        """Return the dot product x . c with every code: (B, H, N, D_k) -> (B, H, N, Z)."""
        return x @ self.codes.to(x.dtype).mT

    def nearest(self, k: Tensor) -> Tensor:
        """Return z, the index of the nearest code of each key: (B, H, N, D_k) -> int64 (B, H, N)."""
        return nearest(k, self.codes, products=self.products(k))

    def watch(self, k: Tensor, codes: Tensor, key_mask: Tensor | None) -> None:
        """Store the keys k (B, H, N, D_k), their codes (B, H, N) and their commitment loss until the next `update`."""
        self.watched: tuple[Tensor, Tensor, Tensor | None] | None = (k.detach(), codes, key_mask)
        self.loss: Tensor | None = commitment(k, codes, self.codes, key_mask=key_mask)

    def forget(self) -> None:
        """Discard the stored keys and loss."""
        self.watched = None
        self.loss = None

    @torch.no_grad()
    def update(self) -> None:
        """Move the codes towards the keys stored by `watch`, and replace unused codes by some of these keys."""
        if self.watched is None:
            return
        k, codes, key_mask = self.watched
        sums, counts = updated_sums(self.sums, self.counts, k, codes, key_mask=key_mask)
        sums, counts = reseeded(sums, counts, k, key_mask=key_mask)
        self.sums.copy_(sums)
        self.counts.copy_(counts)
        self.forget()


def commitment_loss(model: nn.Module) -> Tensor | float:
    """Return 1e-4 times the sum of all codebooks' commitment losses in the last forward pass, or 0.0 if the model has no codebook."""
    return COMMITMENT * sum(book.loss for book in _codebooks(model) if book.loss is not None)


def update_codebooks(model: nn.Module) -> None:
    """Update all codebooks of the model with the keys of the last forward pass."""
    for book in _codebooks(model):
        book.update()


def _codebooks(model: nn.Module) -> list[Codebook]:
    return [module for module in model.modules() if isinstance(module, Codebook)]
