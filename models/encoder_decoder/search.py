"""Generates outputs: greedy search takes the likeliest token at each step, beam search keeps the K likeliest outputs.

Beam search ranks outputs by log p / length^α, and the length includes the end token. α = 1 is the mean log-probability per token.
(Wu et al. 2016, arXiv:1609.08144, eq. 14, divide by ((5 + length) / 6)^α.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.encoder_decoder.model import EncoderDecoder, Tensors


@dataclass(frozen=True)
class SearchOutputs:
    """The outputs of B sources: tokens (B, T) int64, padded with the end token, and the log-probability of each output (B,)."""

    tokens: Tensor
    log_p: Tensor


@torch.inference_mode()
def greedy(model: EncoderDecoder, source: Tensor, mask: Tensor) -> SearchOutputs:
    """Generate outputs of at most `max_output` tokens for sources (B, N) int64 with a mask (B, N) bool, by greedy search."""
    c = model.config
    memory, state = model.read(source, mask)
    token = torch.full((len(source),), c.begin_token_id, device=source.device)
    log_p, ended, written = torch.zeros(len(source), device=source.device), torch.zeros_like(mask[:, 0]), list[Tensor]()
    while len(written) < c.max_output and not bool(ended.all()):
        logits, state, _ = model.step(token, state, memory, mask)
        best = torch.log_softmax(logits.float(), dim=-1).max(-1)
        token = torch.where(ended, c.end_token_id, best.indices)
        log_p = log_p + torch.where(ended, 0.0, best.values)
        ended = ended | (token == c.end_token_id)
        written.append(token)
    return SearchOutputs(torch.stack(written, dim=1), log_p)


@torch.inference_mode()
def beam(model: EncoderDecoder, source: Tensor, mask: Tensor, *, width: int, length_power: float = 1.0) -> SearchOutputs:
    """Generate with beam search, which keeps `width` (K) outputs per source, and return the best output of each source. All B K outputs
    are computed in one batch. An ended output remains in the beam as long as its score is among the K best of its source. The search
    stops when all outputs have ended, or at `max_output` tokens."""
    c, B, K = model.config, len(source), width
    memory, state = model.read(source, mask)
    rows = torch.arange(B, device=source.device).repeat_interleave(K)
    memory, state, mask = _take(memory, rows), _take(state, rows), mask[rows]
    token = torch.full((B * K,), c.begin_token_id, device=source.device)
    log_p = torch.full((B, K), -torch.inf, device=source.device)
    log_p[:, 0] = 0.0  # the other K - 1 have log p = -inf, so the first step extends only one of the K equal beginnings
    length, ended = torch.zeros_like(log_p), torch.zeros_like(log_p, dtype=torch.bool)
    written = source.new_empty(B, K, 0)
    only_end = torch.full((c.vocab_size,), -torch.inf, device=source.device)
    only_end[c.end_token_id] = 0.0
    while written.shape[2] < c.max_output and not bool(ended.all()):
        logits, state, _ = model.step(token, state, memory, mask)
        gain = torch.log_softmax(logits.float(), dim=-1).view(B, K, -1)
        gain = torch.where(ended[:, :, None], only_end, gain)  # an ended output gets only end tokens, with log p 0
        longer = length + ~ended
        total = log_p[:, :, None] + gain  # (B, K, V)
        best = (total / longer[:, :, None] ** length_power).flatten(1).topk(K)
        parent, token = best.indices // c.vocab_size, best.indices % c.vocab_size  # (B, K)
        log_p = total.flatten(1).gather(1, best.indices)
        length, ended = longer.gather(1, parent), ended.gather(1, parent) | (token == c.end_token_id)
        written = torch.cat([written.gather(1, parent[:, :, None].expand_as(written)), token[:, :, None]], dim=2)
        state = _take(state, (parent + K * torch.arange(B, device=source.device)[:, None]).flatten())
        token = token.flatten()
    first = (log_p / length**length_power).argmax(1)
    return SearchOutputs(written[torch.arange(B), first], log_p[torch.arange(B), first])


def _take(tensors: Tensors, rows: Tensor) -> Tensors:
    return {name: tensor[rows] for name, tensor in tensors.items()}


@torch.inference_mode()
def attended(model: EncoderDecoder, source: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of `greedy` (B, T), and each output token's attention weights on the source (B, T, N)."""
    tokens = greedy(model, source, mask).tokens
    memory, state = model.read(source, mask)
    previous, weights = torch.full_like(tokens[:, 0], model.config.begin_token_id), []
    for token in tokens.unbind(1):
        _, state, seen = model.step(previous, state, memory, mask)
        weights.append(seen)
        previous = token
    return tokens, torch.stack(weights, dim=1)
