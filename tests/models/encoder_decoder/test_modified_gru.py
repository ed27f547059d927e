"""The gated unit against its equations, written out."""

import math

import torch
from torch import Tensor

from models.encoder_decoder.modified_gru import ModifiedGru

TOLERANCE = 1e-12  # float64, a dozen additions


def cell(d_output: int = 3, d_context: int = 4, d_state: int = 5) -> ModifiedGru:
    torch.manual_seed(1)
    made = ModifiedGru(d_output, d_context, d_state).double()
    torch.nn.init.normal_(made.from_y.bias)
    return made


def by_the_equations(cell: ModifiedGru, y: list[float], c: list[float], s: list[float]) -> list[float]:
    """Number by number, as the paper has them."""
    n = len(s)
    W_y, b, W_c = cell.from_y.weight.tolist(), cell.from_y.bias.tolist(), cell.from_c.weight.tolist()
    W_s = [W.tolist() for W in (cell.W_sr, cell.W_sz, cell.W_ss)]

    def given(gate: int, i: int) -> float:
        row = gate * n + i
        return sum(w * x for w, x in zip(W_y[row], y, strict=True)) + sum(w * x for w, x in zip(W_c[row], c, strict=True)) + b[row]

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    r = [sigmoid(given(0, i) + sum(W_s[0][i][j] * s[j] for j in range(n))) for i in range(n)]
    z = [sigmoid(given(1, i) + sum(W_s[1][i][j] * s[j] for j in range(n))) for i in range(n)]
    candidate = [math.tanh(given(2, i) + sum(W_s[2][i][j] * s[j] * r[j] for j in range(n))) for i in range(n)]
    return [z[i] * s[i] + (1 - z[i]) * candidate[i] for i in range(n)]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_equations_number_by_number() -> None:
    made, y, c, s = cell(), drawn(2, 3, seed=2), drawn(2, 4, seed=3), drawn(2, 5, seed=4)
    got = made(made.from_y(y), c, s)
    want = [by_the_equations(made, *(each[row].tolist() for each in (y, c, s))) for row in range(2)]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=TOLERANCE, rtol=0)
