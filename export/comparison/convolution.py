"""A convolution: the output of a token is a sum over the `kernel` tokens around it, each multiplied by the matrix of its offset.

y_i = sum_{|δ| <= k / 2} W_δ x_{i+δ} + b,   W_δ is (D, D)
It is no attention mechanism. It is compared because the complexity table of Vaswani et al. 2017 lists it. O(k N D²) time.
"""

from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples, Mechanism


class Convolution(Mechanism):
    """Maps x (B, N, D) and a bool mask (B, N) to (B, N, D)."""

    capabilities = Capabilities(cross=False, ordered=True, averages=False, weights="none")
    cost = Cost("O(k N D²)", lambda N, s: s.kernel * N * s.D * s.D, ComplexityRow("convolution k", "O(N / k)"))
    examples = Examples(large={"kernel": 7}, varied=("kernel", (3, 7, 15, 31)))

    def __init__(self, d_model: int, n_heads: int, *, kernel: int = 7) -> None:
        super().__init__()
        self.conv = nn.Conv1d(d_model, d_model, kernel, padding=kernel // 2)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        return self.conv((x * key_mask[..., None]).mT).mT
