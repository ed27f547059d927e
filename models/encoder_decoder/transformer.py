"""The Transformer as an encoder-decoder: self-attention over the source, causal self-attention over the output, and
cross-attention.

encoder block:  x = x + self(norm(x));  x = x + feedforward(norm(x))
decoder block:  y = y + causal(norm(y));  y = y + cross(norm(y), memory);  y = y + feedforward(norm(y))
norm="post":  x = norm(x + self(x)), and so on, without a norm after the last block
Vaswani et al. 2017, arXiv:1706.03762, section 3. Positions are rotary (Su et al. 2021, arXiv:2104.09864), or sinusoids or learned
vectors that are added to the embeddings: x_t = sqrt(D) embedding + position_t, on both sides (sections 3.4 and 3.5).
The memory contains each block's keys and values of the source, computed once. The state has a constant size, as it has space for
the keys and values of the longest output.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.causal_softmax import CausalSoftmaxAttention
from models.attention.layers.cross import CrossAttention
from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.layers.scaled_dot_product import attend, masked_softmax
from models.encoder.model import Encoder, EncoderConfig
from models.encoder_decoder.config import TransformerConfig
from models.encoder_decoder.model import EncoderDecoder, Tensors
from models.parts.feedforward import FeedForward
from models.parts.modules import Modules
from models.parts.positions import Rotation, RotationTable, rotate, sinusoids


class TransformerEncoderDecoder(EncoderDecoder):
    """A Transformer encoder and decoder. The memory is `keys_i` and `values_i` (B, N, D) of each block i. The state is `keys_i`
    and `values_i` (B, H, T, D_k), with T = max_output, and `place` (B, T), a one-hot vector of the current position. `step`
    returns the attention weights of the last block, averaged over its heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = c = config
        self.encoder = Encoder(_encoder_config(c))
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks: Modules[CrossAttentionBlock] = Modules(CrossAttentionBlock(c) for _ in range(c.n_decoder_layers))
        self.final_norm = nn.LayerNorm(c.d_model) if c.norm == "pre" else nn.Identity()
        self.to_logits = nn.Linear(c.d_model, c.vocab_size)
        self.positions: Tensor | None
        self.rotations = RotationTable(c.max_output, c.d_model // c.n_heads, base=10_000.0) if c.positions == "rotary" else None
        if c.positions == "learned":
            self.positions = nn.Parameter(torch.randn(c.max_output, c.d_model) * c.d_model**-0.5)  # (T, D)
        else:
            waves = sinusoids(c.max_output, c.d_model).float() if c.positions == "sinusoidal" else None
            self.register_buffer("positions", waves, persistent=False)
        self.apply(_draw_weights)

    def read(self, source: Tensor, mask: Tensor) -> tuple[Tensors, Tensors]:
        h = self.encoder(source, mask.long())
        memory: Tensors = {}
        state = {"place": torch.eye(self.config.max_output, dtype=h.dtype, device=h.device)[0].expand(h.shape[0], -1)}
        for i, block in enumerate(self.blocks):
            memory |= {f"keys_{i}": block.cross.to_k(h), f"values_{i}": block.cross.to_v(h)}
            empty = h.new_zeros(h.shape[0], block.own.n_heads, self.config.max_output, block.own.d_head)
            state |= {f"keys_{i}": empty, f"values_{i}": empty}
        return memory, state

    def step(self, previous: Tensor, state: Tensors, memory: Tensors, mask: Tensor) -> tuple[Tensor, Tensors, Tensor]:
        place = state["place"]
        known = place.flip(1).cumsum(1).flip(1) != 0  # (B, T): True at positions up to the current one
        y, rotation = self._placed(previous[:, None], place[:, None])
        new, weights = {"place": place.roll(1, dims=1)}, mask.to(place.dtype)
        for i, block in enumerate(self.blocks):
            past, source = (state[f"keys_{i}"], state[f"values_{i}"]), (memory[f"keys_{i}"], memory[f"values_{i}"])
            y, (new[f"keys_{i}"], new[f"values_{i}"]), weights = block.step(y, past, place, known, rotation, source, mask)
        return self.to_logits(self.final_norm(y[:, 0])), new, weights

    def forward(self, source: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        h = self.encoder(source, mask.long())
        place = torch.eye(self.config.max_output, dtype=h.dtype, device=h.device)[None, : previous.shape[1]]
        y, rotation = self._placed(previous, place)
        for block in self.blocks:
            y = block(y, rotation, h, mask)
        return self.to_logits(self.final_norm(y))

    def _placed(self, tokens: Tensor, place: Tensor) -> tuple[Tensor, Rotation | None]:
        """Return the input vectors (B, N, D) of the tokens (B, N) and their rotation, (B, 1, N, D_k/2), if positions are rotary.
        place (B, N, T) or (1, N, T): one-hot vectors of their positions. A product with a table reads its rows."""
        y = self.embedding(tokens)
        if self.rotations is not None:
            cos, sin = ((place @ table)[:, None] for table in (self.rotations.cos, self.rotations.sin))
            return y, Rotation(cos, sin)
        assert self.positions is not None
        return y * self.config.embedding_scale + place @ self.positions, None


class CrossAttentionBlock(nn.Module):
    """One block of the decoder: causal self-attention, cross-attention and a feed-forward layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = config
        self.pre_norm = c.norm == "pre"
        self.own_norm, self.cross_norm, self.feedforward_norm = (nn.LayerNorm(c.d_model) for _ in range(3))
        self.own = CausalSoftmaxAttention(c.d_model, c.n_heads, bias=c.attention_bias)
        self.cross = CrossAttention(c.d_model, c.n_heads, d_memory=c.d_model, bias=c.attention_bias)
        self.feedforward = FeedForward(c.d_model, c.d_feedforward, activation=c.activation, gated=False, bias=True)

    def forward(self, y: Tensor, rotation: Rotation | None, h: Tensor, mask: Tensor) -> Tensor:
        """Run the block on all T target positions at once. y (B, T, D): the target's hidden states; `rotation`: the rotary embedding of the
        T positions, if any; h (B, N, D): the encoder's output; mask (B, N): True at source tokens. Returns (B, T, D)."""
        y = self._joined(self.own_norm, y, self.own(self._seen(self.own_norm, y), rotation=rotation)[0])
        y = self._joined(self.cross_norm, y, self.cross(self._seen(self.cross_norm, y), h, mask))
        return self._fed_forward(y)

    def step(
        self,
        y: Tensor,
        past: tuple[Tensor, Tensor],
        place: Tensor,
        known: Tensor,
        rotation: Rotation | None,
        source: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Run the block on one target position y (B, 1, D). Returns (B, 1, D), the keys and values with the new entry at `place`, and the
        attention weights on the source (B, N), averaged over the heads.

        past: keys and values of the earlier target positions, (B, H, T, D_k) each. place (B, T): one-hot vector of the current position.
        known (B, T) bool: True at positions up to the current one. rotation: that of the current position, if any. source: the source's
        keys and values, (B, N, D) each. mask (B, N): nonzero at source tokens.
        """
        own, cross, x = self.own, self.cross, self._seen(self.own_norm, y)
        q, k, v = (split_heads(project(x), own.n_heads) for project in (own.to_q, own.to_k, own.to_v))  # (B, H, 1, D_k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        here = place[:, None, :, None]
        keys, values = (old + here * new for old, new in zip(past, (k, v), strict=True))
        o = attend(q, keys, values, scale=own.d_head**-0.5, mask=known[:, None, None])
        y = self._joined(self.own_norm, y, own.to_out(merge_heads(o)))
        q = split_heads(cross.to_q(self._seen(self.cross_norm, y)), cross.n_heads)
        k, v = (split_heads(each, cross.n_heads) for each in source)  # (B, H, N, D_k)
        weights = masked_softmax((q * cross.scale) @ k.mT, mask[:, None, None])  # (B, H, 1, N)
        y = self._joined(self.cross_norm, y, cross.to_out(merge_heads(weights @ v)))
        return self._fed_forward(y), (keys, values), weights.mean(1).squeeze(1)

    def _fed_forward(self, y: Tensor) -> Tensor:
        return self._joined(self.feedforward_norm, y, self.feedforward(self._seen(self.feedforward_norm, y)))

    def _seen(self, norm: nn.Module, y: Tensor) -> Tensor:
        """Return the input of a sublayer: norm(y) in a pre-norm model, otherwise y."""
        return norm(y) if self.pre_norm else y

    def _joined(self, norm: nn.Module, y: Tensor, o: Tensor) -> Tensor:
        """Return the sum of y and the sublayer's output o, normalised in a post-norm model."""
        return y + o if self.pre_norm else norm(y + o)


def _draw_weights(module: nn.Module) -> None:
    """Initialise linear layers with Xavier's method, as the paper's own code does. Narrow models learn slowly if their weights are
    initialised from N(0, 0.02), like those of the project's other models.
    """
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


def _encoder_config(c: TransformerConfig) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=c.vocab_size,
        d_model=c.d_model,
        n_layers=c.n_encoder_layers,
        n_heads=c.n_heads,
        d_feedforward=c.d_feedforward,
        n_positions=c.max_source,
        positions=c.positions,
        embedding_scale=c.embedding_scale,
        embedding_norm=False,
        norm=c.norm,
        norm_eps=1e-5,
        final_norm=c.norm == "pre",
        activation=c.activation,
    )
