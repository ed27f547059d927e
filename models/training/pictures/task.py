"""A decoder that learns to draw pictures pixel by pixel: text whose documents are all pictures of one size.

Beside the files of `models/training/text/task.py`, OUT has samples.png, pictures that the model draws.
"""

from pathlib import Path

from tokenizers import Tokenizer

from models.checkpoints.decoder import TOKENIZER, save_decoder
from models.decoder.model import Decoder
from models.training.pictures.card import SAMPLES, image_card
from models.training.pictures.drawings import draw
from models.training.task import Report
from models.training.text.task import TextTask
from models.training.tokenizer import beginning


class PicturesTask(TextTask):
    """`tokens.image` must be given."""

    def save(self, out: Path, model: Decoder) -> None:
        """Write the checkpoint. Every training sequence began with <|endoftext|>, so the tokenizer puts it before a prompt."""
        end = self.tokens.end_of_text
        tokenizer = beginning(Tokenizer.from_file(str(self.tokens.tokenizer_file))).to_str(pretty=True)
        save_decoder(out, model, tokenizer=tokenizer, eos_token_ids=(end,), bos_token_id=end, image=self.tokens.image)

    def card(self, out: Path, model: Decoder, report: Report) -> str:
        assert self.tokens.image is not None
        draw(model, self.tokens.image, out / TOKENIZER, out / SAMPLES)
        return image_card(report, self.tokens.sources)
