"""Base of the causal layers, in which a token attends to itself and to earlier tokens.

What a layer needs of the earlier tokens is its state. A call returns the state, and the caller passes it in with the next tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.mechanism import Mechanism
from models.attention.layers.multi_head import EqualHeads
from models.attention.layers.recurrence import Execution, chunkwise
from models.attention.layers.scaled_dot_product import scale_of
from models.parts.positions import Rotation

State = dict[str, Tensor]  # name of a tensor in the paper -> the tensor, whose first axis is the batch


class CausalLayer(Mechanism):
    """Base of the causal layers. A subclass has the constructor Layer(d_model, n_heads, *, d_head=None, bias=False, ..) and the projections
    to_q, to_k, to_v and to_out, which the model initialises. Up to rounding, the outputs and the last state do not depend on how a sequence
    is cut into calls.
    """

    capabilities = Capabilities.of_recurrence()
    biased = False
    recurrence = staticmethod(chunkwise)  # or `parallel` or `recurrent` of recurrence.py, which compute the same results

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the state tensors of one sequence, without the batch axis B. An axis that grows with the tokens has size 0 here."""
        raise NotImplementedError

    def init_state(self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> State:
        """Return the state before the first token: zeros."""
        return {name: torch.zeros(batch, *shape, device=device, dtype=dtype) for name, shape in self.state_shapes.items()}

    def new_state(self, x: Tensor) -> State:
        """Return the state before the first token of x (B, N, D). It is float64 if x is, else float32."""
        return self.init_state(x.shape[0], device=x.device, dtype=at_least_float32(x.dtype))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: State | None = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, State]:
        """Return the outputs (B, N, D) of x (B, N, D), arbitrary at padding, and the state after these N tokens. mask (B, N) bool: True at
        tokens, which are at the left of each row; padding leaves the state bit for bit unchanged, but a growing state gets empty slots.
        rotation: the angles (B, 1, N, D_k/2) of the tokens' absolute positions, which a layer without rotary positions ignores.
        """
        return self.advance(x, mask, self.new_state(x) if state is None else state, rotation)

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        """Compute the outputs and the new state that `forward` returns. Subclasses implement this method. `state` is never None."""
        raise NotImplementedError

    def __call__(self, x: Tensor, mask: Tensor | None = None, state: State | None = None, **options: Any) -> tuple[Tensor, State]:
        """Call `forward`. If B or N is 0, do not call it, but return an empty output and the unchanged state."""
        if 0 in x.shape[:2]:
            return torch.zeros_like(x), self.new_state(x) if state is None else state
        return super().__call__(x, mask, state, **options)

    def prefill(self, x: Tensor, state: State, *, rotation: Rotation | None = None) -> tuple[Tensor, State]:
        """Return the outputs of the tokens x (B, N, D) and the new state. x has no padding and follows the tokens of `state`."""
        return self(x, None, state, rotation=rotation)

    def step(self, x_t: Tensor, state: State, *, rotation: Rotation | None = None) -> tuple[Tensor, State]:
        """Return the output of one token x_t (B, 1, D), which follows the tokens of `state`, and the new state. Raises ValueError for any
        other number of tokens."""
        if x_t.shape[1] != 1:
            raise ValueError(f"a step takes 1 token, not {x_t.shape[1]}; use `prefill` for several")
        return self(x_t, None, state, rotation=rotation)


class EqualHeadsLayer(EqualHeads, CausalLayer):
    """A causal layer whose H heads are equally wide in q, k and v."""

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the matrix S of recurrence.py, (H, D_k, D_v) with D_k = D_v. Layers with another state override this."""
        return {"S": (self.n_heads, self.d_head, self.d_head)}


def attend_causal_features(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    past: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    decay: Tensor | None = None,
    eps: float = 1e-6,
    recurrence: Execution = chunkwise,
) -> tuple[Tensor, Tensor]:
    """Compute o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps),   S_t = exp(a_t) S_{t-1} + φ(k_t) v_tᵀ,   z_t = exp(a_t) z_{t-1} + φ(k_t).

    phi_q, phi_k (B, H, N, D_φ), v (B, H, N, D_v), past [S | z] (B, H, D_φ, D_v + 1), mask (B, N), decay: the log-decays a (B, H, N) -> o
    (B, H, N, D_v) and the new [S | z]. At padding φ(k) is set to 0.
    """
    refuse_cross("causal linear attention", phi_q=phi_q, phi_k=phi_k, v=v)
    past = no_past(v, phi_k.shape[-1], v.shape[-1] + 1) if past is None else past
    o, S = recurrence(phi_q, zero_padding(phi_k, mask), with_ones(v), past, decay=decay)
    return (o[..., :-1] / (o[..., -1:] + eps)).to(v.dtype), S


def no_past(v: Tensor, *shape: int) -> Tensor:
    """Return a state tensor before the first token: zeros (B, H, *shape), with B and H of v (B, H, N, D_v), in float32 at least."""
    return v.new_zeros(*v.shape[:2], *shape, dtype=at_least_float32(v.dtype))


def attend_to_past(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, mask: Tensor) -> Tensor:
    """Compute `scaled_dot_product.attend` by torch's fused operator. mask bool (B or 1, 1, N_q, N_k): every query must see at least one
    key.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale_of(q, scale))


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, H, N) or (B, H, N, D_k) with 0 where mask (B, N) is False."""
    if mask is None:
        return x
    return x * (mask[:, None, :] if x.dim() == 3 else mask[:, None, :, None])


def with_ones(v: Tensor) -> Tensor:
    """Return [v | 1]: (B, H, N, D_v) -> (B, H, N, D_v + 1), float32 at least, because sums of the last column grow like N."""
    v = v.to(at_least_float32(v.dtype))
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the state and the sums of a layer with inputs of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
