"""What every causal layer promises: a token sees itself and its past, and the past is a state that can be taken out and put back."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.mechanism import Mechanism
from models.attention.layers.multi_head import EqualHeads
from models.attention.layers.recurrence import Execution, chunkwise
from models.parts.positions import Rotation

State = dict[str, Tensor]  # by the paper's names, batch first


class CausalLayer(Mechanism):
    """Base of the causal layers. A subclass is built as Layer(d_model, n_heads, *, d_head=None, bias=False, ..).

    Its projections to and from heads are called to_q, to_k, to_v and to_out, and the model draws their weights; all others the layer draws
    itself. Parallel, in chunks or token by token, one sequence gives the same outputs and the same state.
    """

    capabilities = Capabilities.of_recurrence()
    recurrence = staticmethod(
        chunkwise
    )  # of models/attention/layers/recurrence.py; another execution of the same function may take its place

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one sequence, that is without B; a state that grows has 0 for the axis along which it does."""
        raise NotImplementedError

    def init_state(self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> State:
        """The state before the first token: zeros."""
        return {name: torch.zeros(batch, *shape, device=device, dtype=dtype) for name, shape in self.state_shapes.items()}

    def new_state(self, x: Tensor) -> State:
        """The state before the first token of x (B, N, D): float32, and float64 for float64 inputs."""
        return self.init_state(x.shape[0], device=x.device, dtype=at_least_float32(x.dtype))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        state: State | None = None,
        *,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, State]:
        """(B, N, D) -> (B, N, D) and the state after these N tokens; the state given is left as it was.

        mask (B, N) bool: True = token; a row's tokens stand at its left, and its padding leaves the state bit for bit (one that grows gets
        room that is never seen). A padded token may get anything. state None: the beginning. N = 1 is a step. rotation: of the tokens'
        absolute positions, angles (B, 1, N, D_k/2); a layer that does not rotate ignores it.
        """
        raise NotImplementedError

    def __call__(self, x: Tensor, mask: Tensor | None = None, state: State | None = None, **options: Any) -> tuple[Tensor, State]:
        """`forward`, but for 0 rows or 0 tokens, which give 0 outputs and leave the state as it was."""
        if 0 in x.shape[:2]:
            return torch.zeros_like(x), self.new_state(x) if state is None else state
        return super().__call__(x, mask, state, **options)

    def prefill(self, x: Tensor, state: State, *, rotation: Rotation | None = None) -> tuple[Tensor, State]:
        """Tokens (B, N, D), none of them padding, after those that a state holds; `init_state` has the state before the first."""
        return self(x, None, state, rotation=rotation)

    def step(self, x_t: Tensor, state: State, *, rotation: Rotation | None = None) -> tuple[Tensor, State]:
        """One token more, (B, 1, D). Raises ValueError for more than one."""
        if x_t.shape[1] != 1:
            raise ValueError(f"a step is of 1 token, not of {x_t.shape[1]}; give them to `prefill`")
        return self(x_t, None, state, rotation=rotation)


class EqualHeadsLayer(EqualHeads, CausalLayer):
    """A causal layer whose H heads are equally wide in q, k and v."""

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)


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
    """o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps),   S_t = exp(a_t) S_{t-1} + φ(k_t) v_tᵀ,   z_t = exp(a_t) z_{t-1} + φ(k_t)

    (B, H, N, D_φ), same, (B, H, N, D_v), [S | z] (B, H, D_φ, D_v + 1), bool (B, N) -> (B, H, N, D_v), the new [S | z]. past None: zeros.
    decay: a, (B, H, N); None: 0. Masked are the features and not the keys, since φ(0) is seldom 0.
    """
    refuse_cross("causal linear attention", phi_q=phi_q, phi_k=phi_k, v=v)
    past = no_past(v, phi_k.shape[-1], v.shape[-1] + 1) if past is None else past
    o, S = recurrence(phi_q, zero_padding(phi_k, mask), with_ones(v), past, decay=decay)
    return (o[..., :-1] / (o[..., -1:] + eps)).to(v.dtype), S


def no_past(v: Tensor, *shape: int) -> Tensor:
    """Zeros (B, H, *shape) for values v (B, H, N, D_v), in float32 at least."""
    return v.new_zeros(*v.shape[:2], *shape, dtype=at_least_float32(v.dtype))


def attend_to_past(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
    """`scaled_dot_product.attend` by torch's fused operator. mask (B or 1, 1, N_q, N_k): every query must see a key, if only its own."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, N) or (B, H, N, D_k), 0 where mask (B, N) is False."""
    if mask is None:
        return x
    return x * (mask[:, None, :] if x.dim() == 3 else mask[:, None, :, None])


def with_ones(v: Tensor) -> Tensor:
    """[v | 1]: (B, H, N, D_v) -> (B, H, N, D_v + 1). The state is then [S | z], and the last output column φ(q)ᵀz.

    In float32 at least: φ(q)ᵀz grows like N, and 65,504 is all that float16 holds.
    """
    v = v.to(at_least_float32(v.dtype))
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """In which a layer with inputs of `dtype` keeps its state, and takes its sums."""
    return torch.promote_types(dtype, torch.float32)
