"""The recurrent encoder-decoder with attention. A bidirectional GRU reads the source, and a modified GRU attends to it at each
output step.

h_t = [forward GRU; backward GRU] at token t          s_0 = tanh(W_init h)     h: output of the backward GRU at the first token
e_t = a(s, h_t),  α = softmax_t(e),  c = Σ_t α_t h_t   s' = ModifiedGru(y, c, s)     logits = W_out [s'; c]
The score a is additive, w_vᵀ tanh(W_s s + W_h h), or the dot product s · h. Bahdanau et al. 2014, arXiv:1409.0473, sections 3.1, 3.2
and A.2. The paper has an additional maxout layer before the logits. A step costs O(N (A + 2 D_h)). The state has D_s numbers. The
memory stores W_h h, which is computed once per source.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.scaled_dot_product import masked_softmax
from models.encoder_decoder.config import RecurrentConfig
from models.encoder_decoder.model import EncoderDecoder, Tensors
from models.encoder_decoder.modified_gru import ModifiedGru


class RecurrentEncoderDecoder(EncoderDecoder):
    """A bidirectional GRU encoder and a GRU decoder with attention. The memory is `values` (B, N, 2 D_h), which are the h_t, and
    for the additive score `keys` (B, N, A), which are W_h h_t. The state is `s` (B, D_s).
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.d_embedding)
        self.forwards = nn.GRU(c.d_embedding, c.d_encoder, batch_first=True)
        self.backwards = nn.GRU(c.d_embedding, c.d_encoder, batch_first=True)
        self.to_state = nn.Linear(c.d_encoder, c.d_state)
        self.score = AdditiveScore(c.d_state, 2 * c.d_encoder, c.d_hidden) if c.score == "additive" else DotScore()
        self.cell = ModifiedGru(c.d_embedding, 2 * c.d_encoder, c.d_state)
        self.to_logits = nn.Linear(c.d_state + 2 * c.d_encoder, c.vocab_size)

    def read(self, source: Tensor, mask: Tensor) -> tuple[Tensors, Tensors]:
        x = self.embedding(source)  # (B, N, D)
        turn = reversal_indices(mask)
        ahead, _ = self.forwards(x)  # (B, N, D_h)
        back, _ = self.backwards(_rows_at(x, turn))
        back = _rows_at(back, turn)
        h = torch.cat([ahead, back], dim=2) * mask[:, :, None]
        return self.score.memory(h), {"s": torch.tanh(self.to_state(back[:, 0]))}

    def step(self, previous: Tensor, state: Tensors, memory: Tensors, mask: Tensor) -> tuple[Tensor, Tensors, Tensor]:
        s, c, weights = self._advance(self.cell.from_y(self.embedding(previous)), state["s"], memory, mask)
        return self.to_logits(torch.cat([s, c], dim=1)), {"s": s}, weights

    def forward(self, source: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        memory, state = self.read(source, mask)
        s, seen = state["s"], []
        for given_y in self.cell.from_y(self.embedding(previous)).unbind(1):
            s, c, _ = self._advance(given_y, s, memory, mask)
            seen.append(torch.cat([s, c], dim=1))
        return self.to_logits(torch.stack(seen, dim=1))

    def _advance(self, given_y: Tensor, s: Tensor, memory: Tensors, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one decoder step: given_y (B, 3 D_s), s (B, D_s), memory, mask (B, N) -> the new s, the context c (B, 2 D_h) and
        the attention weights (B, N).
        """
        weights = masked_softmax(self.score(s, memory), mask)
        c = (weights[:, None] @ memory["values"]).squeeze(1)
        return self.cell(given_y, c, s), c, weights


class AdditiveScore(nn.Module):
    """The additive score w_vᵀ tanh(W_s s + W_h h), without biases. W_h h is computed once per source."""

    def __init__(self, d_state: int, d_memory: int, d_hidden: int) -> None:
        super().__init__()
        self.from_state = nn.Linear(d_state, d_hidden, bias=False)
        self.from_memory = nn.Linear(d_memory, d_hidden, bias=False)
        self.w_v = nn.Parameter(torch.empty(d_hidden))
        bound = (6 / (d_hidden + 1)) ** 0.5  # Xavier initialisation with A inputs and 1 output
        nn.init.uniform_(self.w_v, -bound, bound)
        for linear in (self.from_state, self.from_memory):
            nn.init.xavier_uniform_(linear.weight)

    def memory(self, h: Tensor) -> Tensors:
        return {"values": h, "keys": self.from_memory(h)}

    def forward(self, s: Tensor, memory: Tensors) -> Tensor:
        """Compute the scores of all source tokens: s (B, D_s) -> (B, N)."""
        return torch.tanh(self.from_state(s)[:, None] + memory["keys"]) @ self.w_v


class DotScore(nn.Module):
    """The dot product s · h as a score."""

    def memory(self, h: Tensor) -> Tensors:
        return {"values": h}

    def forward(self, s: Tensor, memory: Tensors) -> Tensor:
        """Compute the scores of all source tokens: s (B, D_s) -> (B, N)."""
        return (memory["values"] @ s[:, :, None]).squeeze(2)


def reversal_indices(mask: Tensor) -> Tensor:
    """Return indices that reverse the tokens of each row and leave its padding in place: (B, N) bool -> (B, N) int64."""
    t = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, mask.sum(1, keepdim=True) - 1 - t, t)


def _rows_at(x: Tensor, t: Tensor) -> Tensor:
    """Return the rows t (B, N) of x (B, N, D). The code reads N from the shape of t and not of x, because torch's exporter makes the N of
    a GRU's output a constant.
    """
    return x.gather(1, t[:, :, None].expand(-1, -1, x.shape[2]))
