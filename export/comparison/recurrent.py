"""A gated recurrent unit: processes one token after the other and keeps a state of D numbers.

r, z = sigmoid(W x_t + U h_{t-1} + b),   n = tanh(W_n x_t + b_n + r ⊙ (U_n h_{t-1} + c_n)),   h_t = (1 - z) ⊙ n + z ⊙ h_{t-1}
It is no attention mechanism. It is compared because the complexity table of Vaswani et al. 2017 lists it.
Cho et al. 2014, arXiv:1406.1078. O(N D²) time, N steps one after the other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ComplexityRow, Cost, Mechanism


class Recurrent(Mechanism):
    """Maps x (B, N, D) and a bool mask (B, N) to (B, N, D)."""

    capabilities = Capabilities(cross=False, ordered=True, averages=False, weights="none")
    cost = Cost("O(N D²)", lambda N, s: 6 * N * s.D * s.D, ComplexityRow("recurrent", "O(N)", "O(N)"))

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.gru = nn.GRU(d_model, d_model, batch_first=True)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        x = x * key_mask[..., None]
        return self._operator(x) if torch.compiler.is_exporting() else self.gru(x)[0]

    def _operator(self, x: Tensor) -> Tensor:
        """Compute the layer by ONNX's GRU operator, which has gate z before r and the time axis before the batch axis. torch's exporter
        would instead write a node for every token of its example.
        """
        gru: Any = self.gru
        B, N, D = x.shape

        def ordered(weight: Tensor) -> Tensor:
            weight = weight.detach()
            return torch.cat([weight[D : 2 * D], weight[:D], weight[2 * D :]]).unsqueeze(0)

        W, R, b, c = map(ordered, (gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0))
        attributes: dict[str, Any] = {"hidden_size": D, "linear_before_reset": 1}
        inputs = [x.transpose(0, 1), W, R, torch.cat([b, c], dim=1)]
        h, _ = torch.onnx.ops.symbolic_multi_out("GRU", inputs, attributes, dtypes=(x.dtype, x.dtype), shapes=((N, 1, B, D), (1, B, D)))
        return h.squeeze(1).transpose(0, 1)
