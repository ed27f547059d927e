"""The decoder: it maps tokens and the blocks' states to the logits of the next token and new states.

x = embedding;   each block:  x = x + layer(norm(x));  x = x + feedforward(norm(x));   logits = unembedding(norm(x))
The blocks are pre-norm as in GPT-2 (Radford et al. 2019). With L blocks, their projections into the residual stream are initialised
smaller by a factor of sqrt(2 L). Any causal layer may be used in any block. One call can be a whole prefill, a part of it, or one
decode step.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from models.attention.layers.causal import CausalLayer, State, at_least_float32
from models.layers import LAYERS
from models.parts.feedforward import ACTIVATIONS, FeedForward
from models.parts.modules import Modules
from models.parts.positions import Rotation, sinusoids_at
from models.parts.rotary import Rotary, RotaryScaling
from models.parts.scale_norm import ScaleNorm

SINK_WINDOW = "sink_window"
HYBRID = "causal_hybrid"
WITH_FIRST = (SINK_WINDOW, HYBRID)  # layers that attend to a window and the first tokens, and take positions from the rotation
WINDOWED = ("sliding_window", *WITH_FIRST)  # layers with the option `window`
DRAWN = ("to_q", "to_k", "to_v")  # a causal layer's projections that the decoder initialises, if the layer has them


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The hyperparameters of a decoder. Raises ValueError, with the values, if they are invalid or do not fit together."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    d_feedforward: int
    layers: str | tuple[str, ...]  # names of causal layers in LAYERS: one for all blocks, or one per block
    d_head: int | None = None  # None: d_model / n_heads
    window: int = 128  # tokens that a layer of WINDOWED attends to exactly, including the current one, if its options have no window
    layer_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # layer name -> constructor keywords
    positions: Literal["rotary", "sinusoidal", "learned", "none"] = "rotary"
    n_positions: int | None = None  # N_max, the number of rows of a learned position table; None for other kinds of positions
    rotary_base: float = 10_000.0
    rotary_width: int | None = None  # how many columns of each head are rotated; None: all
    rotary_scaling: RotaryScaling | None = None  # for texts longer than those of the training
    norm: Literal["rms", "layer", "scale"] = "rms"
    norm_eps: float = 1e-6
    bias: bool = False  # whether projections and feed-forward layers have biases
    gated: bool = True
    activation: str = "silu"
    tied: bool = True  # unembedding and embedding share weights
    embedding_scale: float = 1.0  # embeddings are multiplied by this

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "d_feedforward"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if len(self.layer_names) != self.n_layers:
            raise ValueError(f"layers has {len(self.layer_names)} entries for n_layers={self.n_layers}")
        causal = [name for name, layer in LAYERS.items() if issubclass(layer, CausalLayer)]
        for name in self.layer_names:
            if name not in causal:
                raise ValueError(f"layers={name!r} is not one of {', '.join(causal)}")
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}; give d_head, or change one of them")
        positions = ("rotary", "sinusoidal", "learned", "none")
        for name, choices in (("positions", positions), ("norm", ("rms", "layer", "scale")), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.positions == "learned" and not (isinstance(self.n_positions, int) and self.n_positions >= 1):
            raise ValueError(f"n_positions={self.n_positions!r}, but positions='learned' needs a table; give its number of rows, 1 or more")
        if self.positions != "learned" and self.n_positions is not None:
            raise ValueError(
                f"n_positions={self.n_positions} is the size of a table, but positions={self.positions!r} has none; leave n_positions out"
            )
        layers: list[Any] = [LAYERS[name] for name in self.layer_names]
        if self.positions == "rotary" and not any(layer.capabilities.rotates for layer in layers):
            raise ValueError(
                f"positions='rotary', but no layer of {', '.join(sorted(set(self.layer_names)))} supports a rotation; use 'none'"
            )
        if self.positions == "rotary" and self.rotated_width % 2:
            name = "d_head" if self.rotary_width is None else "rotary_width"
            raise ValueError(f"{name}={self.rotated_width} is odd, but a rotation needs pairs of columns; choose an even width")
        if self.positions == "rotary":
            self.rotary  # noqa: B018  raises ValueError for a base or a scaling that is invalid
        self._check_layer_options()

    def _check_layer_options(self) -> None:
        for name, options in self.layer_options.items():
            if name not in self.layer_names:
                raise ValueError(f"layer_options has {name!r}, which is not among the layers {', '.join(sorted(set(self.layer_names)))}")
            known = inspect.signature(LAYERS[name]).parameters.keys() - {"d_model"}
            if unknown := options.keys() - known:
                raise ValueError(f"layer_options of {name} has {min(unknown)!r}, which is not one of {', '.join(sorted(known))}")

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layer name, a key of LAYERS, of every block."""
        return (self.layers,) * self.n_layers if isinstance(self.layers, str) else tuple(self.layers)

    def window_of(self, layer: str) -> int:
        """Return the number of tokens that the layers of a name in WINDOWED attend to exactly."""
        return int(self.layer_options.get(layer, {}).get("window", self.window))

    @property
    def rotated_width(self) -> int:
        """Number of columns of a head that are rotated by position."""
        return self.rotary_width or self.d_head or self.d_model // self.n_heads

    @property
    def rotary(self) -> Rotary:
        """The rotation of q and k, if the positions are rotary."""
        return Rotary(width=self.rotated_width, base=self.rotary_base, scaling=self.rotary_scaling)


def take(x: Tensor, places: Tensor) -> Tensor:
    """Return x[b, places[b]] for every row b: x (B, N, D), places (B, M) -> (B, M, D)."""
    return x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))


class Decoder(nn.Module):
    """A decoder from tokens to the logits of the next token. States are float32, or float64 if the weights are float64.

    Weights are initialised from N(0, 0.02), the projections into the residual stream from N(0, 0.02 / sqrt(2 L)), and biases
    with 0. Parameters that only one kind of layer has are initialised by that layer's `begin`.
    """

    take = staticmethod(take)  # an attribute, so that the export can replace it by an operator of the runtime

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embedding = nn.Embedding(c.n_positions, c.d_model) if c.n_positions is not None else None
        self.blocks: Modules[DecoderBlock] = Modules(DecoderBlock(c, name) for name in c.layer_names)
        self.final_norm = _norm(c)
        self.unembedding = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self._draw_weights()
        if c.tied:
            self.unembedding.weight = self.embedding.weight
        self.to(dtype)

    @property
    def takes_positions(self) -> bool:
        """True if `forward` uses its argument `positions`."""
        return self.config.positions != "none"

    @property
    def grows(self) -> bool:
        """True if the state of any block grows with every token or has room for a limited number of tokens."""
        return any(block.layer.capabilities.state != "constant" for block in self.blocks)

    def init_states(self, batch: int) -> list[State]:
        """Return the states of all blocks before the first token: zeros, on the device of the weights."""
        weight = self.embedding.weight
        return [block.layer.init_state(batch, device=weight.device, dtype=at_least_float32(weight.dtype)) for block in self.blocks]

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        states: list[State] | None = None,
        positions: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, list[State]]:
        """Process the next N tokens of B sequences. Return the logits and the states after these tokens.

        tokens (B, N) int64, padded on the right. lengths (B,) int64: the number of tokens of each row; None: N. states: the
        result of `init_states` or of the previous call; None: the initial states. positions (B,) int64: the number of earlier
        tokens of each row; None: 0. wanted (B, M) int64: the indices, 0 to N - 1, at which logits (B, M, V) are computed; None:
        at all indices, (B, N, V). Padding does not change the states, and its logits are undefined. Raises ValueError for a token at or
        beyond `n_positions`.
        """
        c, (B, N) = self.config, tokens.shape
        ahead = torch.arange(N, device=tokens.device)
        mask = None if lengths is None else ahead < lengths[:, None]  # (B, N)
        states = self.init_states(B) if states is None else states
        t = ahead.expand(B, N) if positions is None else positions[:, None] + ahead
        if c.n_positions is not None and not torch.compiler.is_exporting() and t.numel():
            last = int((t if mask is None else t * mask).max())
            if last >= c.n_positions:
                raise ValueError(f"a token at position {last}, but n_positions={c.n_positions}; cut the text, or build the model for more")
        x, rotation = self._embed(tokens, t, t[:, 0] + (N if lengths is None else lengths))
        new_states = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, mask, state, rotation)
            new_states.append(state)
        if wanted is not None:
            x = self.take(x, wanted)  # (B, M, D)
        return self.unembedding(self.final_norm(x)), new_states

    def _embed(self, tokens: Tensor, t: Tensor, lengths: Tensor) -> tuple[Tensor, Rotation | None]:
        """Return the embeddings (B, N, D) of tokens (B, N) at positions t (B, N), and the rotation of q and k, which is None if positions
        are not rotary. lengths (B,): number of tokens of each row up to the end of this call.
        """
        c = self.config
        x = self.embedding(tokens)
        if c.embedding_scale != 1.0:
            x = x * c.embedding_scale
        if c.n_positions is not None:
            assert self.position_embedding is not None
            x = x + self.position_embedding(t.clamp_max(c.n_positions - 1))  # clamped, because positions of padding may exceed the table
        if c.positions == "sinusoidal":
            # Embeddings are scaled as in Vaswani et al. 2017, section 3.4. They are initialised from N(0, 0.02), so without the scale they
            # would be far smaller than the sinusoids, which reach 1.
            x = x * c.d_model**0.5 + sinusoids_at(t, c.d_model).to(x.dtype)
        if c.positions != "rotary":
            return x, None
        rotation = c.rotary.at(t, dtype=x.dtype, lengths=lengths)
        if windows := {c.window_of(name) for name in c.layer_names if name in WITH_FIRST}:
            near = {window: c.rotary.at(t.clamp_max(window - 1), dtype=x.dtype, lengths=lengths) for window in sorted(windows)}
            rotation = rotation._replace(t=t, near=near)
        return x, rotation

    def _draw_weights(self) -> None:
        std = 0.02
        residual_std = std / (2 * self.config.n_layers) ** 0.5
        tables: list[Any] = [self.embedding, self.unembedding] + ([] if self.position_embedding is None else [self.position_embedding])
        for table in tables:
            nn.init.normal_(table.weight, std=std)
        for block in self.blocks:
            into = [getattr(block.layer, name) for name in DRAWN if hasattr(block.layer, name)] + [block.feedforward.up]
            into += [] if block.feedforward.gate is None else [block.feedforward.gate]
            out_of: list[Any] = [block.layer.to_out, block.feedforward.down]
            for linear in into + out_of:
                nn.init.normal_(linear.weight, std=residual_std if linear in out_of else std)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            block.layer.begin()


class DecoderBlock(nn.Module):
    """One block of the decoder, pre-norm: a causal layer and a feed-forward layer, (B, N, D) -> (B, N, D)."""

    def __init__(self, config: DecoderConfig, layer: str) -> None:
        super().__init__()
        c = config
        options: dict[str, Any] = {"n_heads": c.n_heads, "d_head": c.d_head, "bias": c.bias}
        options |= {"window": c.window} if layer in WINDOWED else {}
        options |= {"counted": c.positions != "rotary"} if layer in WITH_FIRST else {}
        self.layer_norm = _norm(c)
        make: Any = LAYERS[layer]
        self.layer: CausalLayer = make(c.d_model, **(options | dict(c.layer_options.get(layer, {}))))
        self.feedforward_norm = _norm(c)
        self.feedforward = FeedForward(c.d_model, c.d_feedforward, activation=c.activation, gated=c.gated, bias=c.bias)

    def forward(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        """Return the block's output (B, N, D) and its new state. The arguments are those of `CausalLayer.forward`."""
        y, state = self.layer(self.layer_norm(x), mask, state, rotation=rotation)
        x = x + y
        return x + self.feedforward(self.feedforward_norm(x)), state


def _norm(c: DecoderConfig) -> nn.Module:
    if c.norm == "rms":
        return nn.RMSNorm(c.d_model, eps=c.norm_eps)
    if c.norm == "scale":
        return ScaleNorm(c.d_model, eps=c.norm_eps)
    return nn.LayerNorm(c.d_model, eps=c.norm_eps, bias=c.bias)
