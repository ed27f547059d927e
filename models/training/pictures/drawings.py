"""Samples pictures from a model, one column for each prompt, for the model card."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image as Picture
from PIL.Image import Resampling
from tokenizers import Tokenizer
from torch import nn

from models.checkpoints.decoder import ImageFormat

ROWS = 4
ENLARGED = 3
GAP = 2  # number of pixels between two pictures
GREY = 96  # grey level of the gaps, 0 to 255


@torch.inference_mode()
def draw(model: nn.Module, image: ImageFormat, tokenizer_file: Path, file: Path, *, seed: int = 0) -> None:
    """Write a PNG with ROWS sampled pictures for each prompt. The same weights and seed give the same pictures."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    prompts = torch.tensor([tokenizer.encode(prompt).ids for prompt in image.prompts] * ROWS)
    levels = _levels(model.eval(), image, prompts, torch.Generator().manual_seed(seed))
    brightness = np.rint(levels * (255 / (len(image.level_token_ids) - 1))).astype(np.uint8)
    tiles = brightness.reshape(ROWS, len(image.prompts), image.height, image.width)
    framed = np.pad(tiles, ((0, 0), (0, 0), (GAP, 0), (GAP, 0)), constant_values=GREY)
    sheet = framed.transpose(0, 2, 1, 3).reshape(ROWS * framed.shape[2], -1)
    Picture.fromarray(sheet).resize((ENLARGED * sheet.shape[1], ENLARGED * sheet.shape[0]), Resampling.NEAREST).save(file)


def _levels(model: nn.Module, image: ImageFormat, prompts: torch.Tensor, random: torch.Generator) -> np.ndarray:
    """Sample grey levels (B, n_pixels) for prompts (B, N) of one length. Each step computes one pixel of every row."""
    device = next(model.parameters()).device
    allowed = torch.tensor(image.level_token_ids)
    fresh, states, position, drawn = prompts, None, 0, []
    for _ in range(image.n_pixels):
        at = torch.full((len(prompts),), position, device=device)
        logits, states = model(fresh.to(device), None, states, at)
        position += fresh.shape[1]
        chances = logits[:, -1, allowed.to(device)].float().cpu().softmax(dim=-1)
        drawn.append(torch.multinomial(chances, 1, generator=random))  # (B, 1)
        fresh = allowed[drawn[-1]]
    return torch.cat(drawn, dim=1).numpy()
