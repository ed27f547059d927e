"""Draws a model's attention weights for one number."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.search import attended
from models.training.number_words.words import LANGUAGES, in_words

NUMBER = 142_857
SHOWN = 4  # number of languages in the attention picture


def draw_attention(model: EncoderDecoder, tokenizer: Tokenizer, languages: tuple[str, ...], file: Path) -> None:
    """Draw one attention map per language for the same number, with a row per output digit and a column per source character."""
    shown = languages[:SHOWN]
    figure = Figure(figsize=(13, 2.4 * len(shown)), layout="constrained")
    for axes, language in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        text = in_words(NUMBER, language)
        ids = torch.tensor([tokenizer.encode(text).ids])
        tokens, weights = attended(model, ids, torch.ones_like(ids, dtype=torch.bool))
        axes.imshow(weights[0].numpy(), cmap="magma", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(text)), list(text), fontsize="small")
        axes.set_yticks(range(tokens.shape[1]), [tokenizer.id_to_token(int(token)) for token in tokens[0]], fontsize="small")
        axes.set_title(LANGUAGES[language], fontsize="medium", loc="left")
    figure.savefig(file, dpi=110, format="png")
