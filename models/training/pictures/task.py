"""The training of a decoder that generates pictures pixel by pixel. All its documents are pictures of one size.

Besides the files of `models/training/text/task.py`, the output folder has samples.png, with pictures sampled from the model.
"""

from pathlib import Path

from tokenizers import Tokenizer

from models.checkpoints.decoder import save_decoder
from models.checkpoints.own import TOKENIZER
from models.decoder.model import Decoder
from models.training.cards import Card
from models.training.pictures.card import SAMPLES, image_card
from models.training.pictures.drawings import draw
from models.training.task import Report
from models.training.text.task import TextTask
from models.training.tokenizer import beginning


class PicturesTask(TextTask):
    """The training of a decoder on pictures. `tokens.image` must not be None."""

    def save(self, out: Path, model: Decoder) -> None:
        """Write the checkpoint. Its tokenizer puts <|endoftext|> before each prompt, as every training sequence began with it."""
        end = self.tokens.end_of_text
        tokenizer = beginning(Tokenizer.from_file(str(self.tokens.tokenizer_file))).to_str(pretty=True)
        save_decoder(out, model, tokenizer=tokenizer, eos_token_ids=(end,), bos_token_id=end, image=self.tokens.image)

    def card(self, out: Path, model: Decoder, report: Report) -> Card:
        assert self.tokens.image is not None
        draw(model, self.tokens.image, out / TOKENIZER, out / SAMPLES)
        return image_card(report, self.tokens.sources)
