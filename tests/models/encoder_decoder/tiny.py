"""Encoder-decoders small enough to be compared entry by entry."""

from typing import Any

import torch
from torch import Tensor

from models.encoder_decoder.config import RecurrentConfig, TransformerConfig
from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder
from models.encoder_decoder.transformer import TransformerEncoderDecoder

VOCABULARY = {"vocab_size": 11, "begin_token_id": 1, "end_token_id": 2, "max_source": 20, "max_output": 6}
RECURRENT = {"d_embedding": 5, "d_encoder": 4, "d_state": 8, "d_hidden": 3}
TRANSFORMER = {"d_model": 8, "n_heads": 2, "d_feedforward": 12, "n_encoder_layers": 2, "n_decoder_layers": 2}
PAPERS = {"positions": "sinusoidal", "norm": "post", "activation": "relu", "attention_bias": True}  # Vaswani et al. 2017
KINDS = ("additive", "dot", "transformer", "transformer of the paper", "transformer with learned positions")


def tiny(kind: str, **changes: Any) -> EncoderDecoder:
    """In float64, from a fixed seed."""
    torch.manual_seed(0)
    if kind == "transformer of the paper":
        changes = PAPERS | changes
    if kind == "transformer with learned positions":
        changes = {"positions": "learned"} | changes
    if kind.startswith("transformer"):
        return TransformerEncoderDecoder(TransformerConfig(**(VOCABULARY | TRANSFORMER | changes))).double().eval()
    return RecurrentEncoderDecoder(RecurrentConfig(score=kind, **(VOCABULARY | RECURRENT | changes))).double().eval()


def sources(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens (B, N) of these lengths, with their mask."""
    ids = torch.randint(3, 11, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
