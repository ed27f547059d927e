"""Attention transfer: every layer's feature maps learn to give the outputs of softmax attention, from the teacher's own inputs.

Zhang et al. 2024 (LoLCATs), arXiv:2410.10254, section 3.2. All layers are trained in one pass of the teacher. No gradient passes from
one layer to another, so what the maps do not change is computed once for a text: queries, keys, values, the softmax over near keys, and
the outputs to imitate.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.causal import State, with_ones
from models.attention.layers.multi_head import merge_heads
from models.attention.linear.causal_hybrid import CausalHybridAttention, mixed, query_features
from models.decoder.model import Decoder
from models.parts.positions import Rotation, rotate


class Seen(NamedTuple):
    """What a layer computes for one text without its maps. N tokens, of which the first has position 0."""

    q: Tensor  # (1, H, N, D_k), not rotated
    k: Tensor  # (1, H_k, N, D_k), rotated as if they had just left the window
    v: Tensor  # (1, H_k, N, D_k + 1), with a column of ones
    near: Tensor  # (1, H, N, D_k + 1), softmax over near keys times values, with a column of ones
    log_near: Tensor  # (1, H, N, 1), the log of the sum of the exponentials of the near scores
    o: Tensor  # (1, H, N, D_k), softmax attention to all keys

    @property
    def window_error(self) -> Tensor:
        """The squared error (N,) of attention to near keys alone."""
        return (self.near[..., :-1] - self.o).square().sum((0, 1, 3))


class Recorder(nn.Module):
    """Softmax attention with the projections of a hybrid layer. Each call keeps, in `seen`, what training needs of the text."""

    def __init__(self, layer: CausalHybridAttention) -> None:
        super().__init__()
        self.layer = layer
        self.seen: Seen

    @torch.no_grad()
    def forward(self, x: Tensor, mask: None, state: State, rotation: Rotation) -> tuple[Tensor, State]:
        """Return the outputs (1, N, D) of softmax attention to x (1, N, D). `state` is passed on."""
        layer = self.layer
        q, k, v = layer.heads(x)
        left = rotate(k, _angle(rotation, layer.n_near))
        turned, k, v = rotate(q, rotation), rotate(k, rotation), with_ones(v)
        every = layer.for_every_head
        o = F.scaled_dot_product_attention(turned, every(k), every(v[..., :-1]), is_causal=True)
        near, log_near = _near(layer, turned, rotate(q, rotation.within(layer.window)), every(k), every(v))
        self.seen = Seen(q, left, v, near, log_near, o)
        return layer.to_out(merge_heads(o).to(x.dtype)), state


def recording(student: Decoder) -> tuple[Decoder, list[Recorder]]:
    """Replace the hybrid layers by recorders, in place, so that the decoder computes what its teacher does. Return it and the recorders."""
    recorders = []
    for block in student.blocks:
        if isinstance(block.layer, CausalHybridAttention):
            recorders.append(Recorder(block.layer))
            block.layer = recorders[-1]  # type: ignore[assignment]
    return student, recorders


@torch.no_grad()
def record(teacher: Decoder, recorders: list[Recorder], tokens: list[int]) -> list[Seen]:
    """Return what every layer computes for a text, without the maps."""
    teacher(torch.tensor([tokens]), states=[{} for _ in teacher.blocks], wanted=torch.tensor([[len(tokens) - 1]]))
    return [recorder.seen for recorder in recorders]


def transfer_error(layer: CausalHybridAttention, seen: Seen, part: slice) -> Tensor:
    """Return the squared error (n,) of the layer's outputs for the n queries of a part of a text."""
    left = slice(max(part.start - layer.n_near, 0), part.stop - layer.n_near)
    phi_q, m = query_features(layer.phi_q(seen.q[:, :, part]))
    phi_k = layer.phi_k(seen.k[:, :, layer.n_first : left.stop]).softmax(-1)
    v, earlier = seen.v[:, :, layer.n_first : left.stop], max(left.start - layer.n_first, 0)
    every = layer.for_every_head
    S = every(phi_k[:, :, :earlier].mT @ v[:, :, :earlier])
    n = part.stop - part.start
    now_k, now_v = (F.pad(x[:, :, earlier:], (0, 0, n - x[:, :, earlier:].shape[2], 0)) for x in (phi_k, v))
    far, _ = layer.recurrence(phi_q, every(now_k), every(now_v), S)
    share = torch.sigmoid(m - seen.log_near[:, :, part])
    o = mixed((1 - share) * seen.near[:, :, part], share, far)
    return (o - seen.o[:, :, part]).square().sum((0, 1, 3))


def _near(layer: CausalHybridAttention, q: Tensor, q_first: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over near keys times values, and the log of its divisor: q, k (1, H, N, D_k), v (1, H, N, D_k + 1)."""
    g, L, N, scale = layer.n_first, layer.n_near, q.shape[2], layer.d_head**-0.5
    t, outputs, logs = torch.arange(N), [], []
    for begin in range(0, N, L):
        here, keys = slice(begin, min(begin + L, N)), slice(max(g, begin - L + 1), min(begin + L, N))
        age = t[here, None] - t[None, keys]
        scores = torch.cat(
            [
                (q_first[:, :, here] @ k[:, :, :g].mT * scale).masked_fill(t[None, :g] > t[here, None], -torch.inf),
                (q[:, :, here] @ k[:, :, keys].mT * scale).masked_fill((age < 0) | (age >= L), -torch.inf),
            ],
            dim=-1,
        )
        logs.append(scores.logsumexp(-1, keepdim=True))
        outputs.append((scores - logs[-1]).exp() @ torch.cat([v[:, :, :g], v[:, :, keys]], dim=2))
    return torch.cat(outputs, dim=2), torch.cat(logs, dim=2)


def _angle(rotation: Rotation, L: int) -> Rotation:
    """Return the rotation by -L positions, from one that begins at position 0."""
    return Rotation(rotation.cos[..., L : L + 1, :], -rotation.sin[..., L : L + 1, :])
