"""The graph of a decoder's step for GPUs: from one token and state of each row to the next token and the new state.

The token is drawn in the graph, because copying the logits of many rows to the host takes longer than a step. Random numbers are inputs:
the host computes one for each row from its seed and position. States are float32, weights have the precision of the decoder.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from export import contract
from export.checks.decoder_parity import Steps
from export.checks.golden import N_TOP, cosines
from export.checks.parity import Reference, Tensors
from export.errors import ExportError
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.decoder_step import OPSET, states_of
from export.graphs.draw import BLOCK
from export.graphs.torch_graph import TorchGraph
from models.decoder.model import Decoder

CANDIDATES = 1024  # top_k and top_p are computed among this number of likeliest tokens


def sampling_step_graph(decoder: Decoder) -> TorchGraph:
    """Return the graph of `contract.sampling_interface`."""
    interface = contract.sampling_interface(states_of(decoder), takes_positions=decoder.takes_positions)
    return TorchGraph(SamplingStep(decoder), *interface, {"B": 3}, opset=OPSET, forms=FORMS)


def trace(decoder: Decoder, file: Path) -> None:
    """Write the graph, with its weights in a second file. The decoder is unchanged."""
    with with_operators(decoder):
        sampling_step_graph(decoder).export(file, weights_beside=True)


def compare_sampling(graph: Reference, inputs: Tensors, reference: Steps, prompts: Sequence[Sequence[int]]) -> float:
    """Feed prompts token by token to the graph, and whole to the reference. Return the lowest cosine of a state tensor after a prompt.

    Raises ExportError if the likeliest token, which the graph draws, is not among the reference's 8 likeliest.
    """
    worst = 1.0
    for prompt in prompts:
        states, drawn = reference.begin(1), -1
        for position, token in enumerate(prompt):
            numbers = {contract.TOKENS: token, contract.TEMPERATURE: 1, contract.TOP_K: 1, contract.TOP_P: 1, contract.UNIFORM: 0}
            numbers[contract.POSITIONS] = position
            feed = {each.name: np.array([numbers[each.name]], each.dtype) for each in inputs if each.name in numbers}
            outputs = dict(graph(feed | states))
            drawn, states = int(outputs[contract.DRAWN][0]), {name: outputs[f"new_{name}"] for name in states}
        length = np.array([len(prompt)])
        logits, wanted = reference.run(np.array([prompt]), length, np.array([0]), reference.begin(1), length[:, None] - 1)
        if drawn not in np.argsort(-logits[0, 0])[:N_TOP]:
            raise ExportError(f"after {prompt} the graph for GPUs draws {drawn}, which is not among the {N_TOP} likeliest tokens")
        worst = min(worst, *(float(cosines(states[name].reshape(1, -1), wanted[name].reshape(1, -1))[0]) for name in states))
    return worst


class SamplingStep(nn.Module):
    """A decode step of one token in each row, with its draw."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.names = [list(states) for states in decoder.init_states(1)]  # the names of the state tensors of each layer
        self.draw = Draw(decoder.config.vocab_size)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Map the inputs of `contract.sampling_interface` to its outputs."""
        tokens, temperature, top_k, top_p, uniform, *rest = inputs
        positions = rest.pop(0) if self.decoder.takes_positions else None
        flat = iter(rest)
        states = [{name: next(flat) for name in names} for names in self.names]
        logits, new = self.decoder(tokens.unsqueeze(1), None, states, positions)
        drawn = self.draw(logits.squeeze(1).float(), temperature, top_k, top_p, uniform)
        return drawn, *(state[name] for state, names in zip(new, self.names, strict=True) for name in names)


class Draw(nn.Module):
    """Draws one token for each row of logits, in the order of `export/graphs/draw.py`.

    A row with top_k or top_p draws among its likeliest tokens, sorted by falling logit. Another row draws a block of tokens, and then a
    token in it. Cumulative sums are products with a triangular matrix, since CumSum on a GPU adds up to every number anew. Sums are
    products with ones, since other sums may need cuDNN.
    """

    upper_candidates: Tensor
    upper_blocks: Tensor
    upper_block: Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.n_candidates = min(CANDIDATES, vocab_size)
        self.n_blocks = -(-vocab_size // BLOCK)
        for name, size in (("upper_candidates", self.n_candidates), ("upper_blocks", self.n_blocks), ("upper_block", BLOCK)):
            self.register_buffer(name, torch.ones(size, size).triu(), persistent=False)  # x @ triu sums x up to each column

    def forward(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        """Return token ids (B,): logits (B, V), the others (B,). temperature > 0; top_k = 0 and top_p = 1 mean no limit. The likeliest
        token is drawn with top_k = 1 and uniform = 0.

        The id is -1 if the largest logit is not finite, and if top_k or top_p need more than CANDIDATES tokens.
        """
        temperature, top_k, top_p, uniform = (x.unsqueeze(1) for x in (temperature, top_k, top_p, uniform))  # (B, 1)
        best, ids = logits.topk(self.n_candidates)  # (B, K), sorted
        peak = best[:, :1]
        weights = ((logits - peak) / temperature).exp()  # (B, V)
        padding = BLOCK * self.n_blocks - self.vocab_size
        blocks = nn.functional.pad(weights, (0, padding)).reshape(-1, self.n_blocks, BLOCK)
        sums = (blocks @ torch.ones(BLOCK, 1)).squeeze(2)  # (B, blocks)
        up_to_block = sums @ self.upper_blocks
        total = up_to_block[:, -1:]
        limited, fits = self._limited(((best - peak) / temperature).exp(), ids, total, top_k, top_p, uniform)
        drawn = torch.where((top_k > 0) | (top_p < 1), limited, self._of_all(blocks, sums, up_to_block, uniform * total))
        return torch.where(fits & (peak.abs() < torch.finfo(torch.float32).max), drawn, -1).squeeze(1)

    def _of_all(self, blocks: Tensor, sums: Tensor, up_to_block: Tensor, mass: Tensor) -> Tensor:
        """Return the token (B, 1) at which the cumulative weight of the blocks (B, blocks, BLOCK) exceeds `mass`."""
        block = _place(up_to_block, mass)
        chosen = (torch.arange(self.n_blocks) == block).float()  # (B, blocks), 1 at the drawn block
        rest = mass - _dot(up_to_block - sums, chosen)
        inside = (chosen.unsqueeze(1) @ blocks).squeeze(1)  # (B, BLOCK)
        return block * BLOCK + _place(inside @ self.upper_block, rest)

    def _limited(self, weights: Tensor, ids: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token (B, 1) that is drawn among the likeliest, and whether these are all that top_k and top_p keep: weights (B, K),
        ids (B, K), the others (B, 1).
        """
        K = self.n_candidates
        rank = torch.arange(K)
        up_to = weights @ self.upper_candidates  # (B, K)
        limit = torch.where((top_k > 0) & (top_k < K), top_k, K)
        whole = torch.where(top_k > 0, _dot(up_to, (rank == limit - 1).float()), total)
        count = torch.where(top_p < 1, torch.minimum(_count(up_to < top_p * whole) + 1, limit), limit)
        kept = _dot(up_to, (rank == count - 1).float())
        choice = torch.minimum(_count(up_to <= uniform * kept), count - 1)
        known = (top_k > 0) | (top_p >= 1) | (up_to[:, -1:] >= top_p * total)
        fits = (top_k <= K) & known if self.vocab_size > K else top_k >= 0
        return ids.gather(1, choice), fits


def _place(cumulative: Tensor, mass: Tensor) -> Tensor:
    """Return the index (B, 1) of the first cumulative sum (B, W) above `mass` (B, 1), but never behind the last positive weight."""
    return torch.minimum(_count(cumulative <= mass), _count(cumulative < cumulative[:, -1:]))


def _count(x: Tensor) -> Tensor:
    """Count the trues of each row: (B, W) -> (B, 1) int64."""
    return (x.float() @ torch.ones(x.shape[1], 1)).long()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of each row of x and y: (B, W), (B, W) -> (B, 1)."""
    return (x * y) @ torch.ones(x.shape[1], 1)
