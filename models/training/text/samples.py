"""Samples a model's continuations of a few prompts, for the model card."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from models.decoder.model import Decoder

PROMPTS = (
    "import os\nimport json\n\n\ndef read_config(path):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def is_prime(n: int) -> bool:\n    """Return True if',
)
N_TOKENS = 80
TEMPERATURE = 0.5


@torch.inference_mode()
def continuations(model: nn.Module, tokenizer_file: Path, *, end_of_text: int, seed: int = 0) -> list[tuple[str, str]]:
    """Sample (prompt, continuation) pairs on the model's device. The same weights and seed give the same pairs."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    random = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    return [(prompt, _continue(model.eval(), tokenizer, prompt, end_of_text, random, device)) for prompt in PROMPTS]


def _continue(model: nn.Module, tokenizer: Tokenizer, prompt: str, end_of_text: int, random: torch.Generator, device: torch.device) -> str:
    fresh, states, written, position = [end_of_text, *tokenizer.encode(prompt).ids], None, list[int](), 0
    longest = model.config.n_positions if isinstance(model, Decoder) else None
    while len(written) < N_TOKENS and (longest is None or position + len(fresh) <= longest):
        logits, states = model(torch.tensor([fresh], device=device), None, states, torch.tensor([position], device=device))
        position += len(fresh)
        chances = (logits[0, -1].float().cpu() / TEMPERATURE).softmax(dim=-1)
        token = int(torch.multinomial(chances, 1, generator=random))
        if token == end_of_text:
            break
        written.append(token)
        fresh = [token]
    return tokenizer.decode(written)
