"""The training of a decoder on the next token of text.

Besides what every task writes (see run.py), its output folder has:
OUT/
  config.json, model.safetensors, tokenizer.json   models/checkpoints/decoder.py
  loss.png         curves, drawn at every evaluation
  sources.json     every package of the training text, with its licence and size
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from models.attention.layers.causal import CausalLayer
from models.attention.layers.recurrence import chunkwise
from models.attention.linear.codebook import commitment_loss, update_codebooks
from models.attention.linear.random_features import redraw_features
from models.checkpoints.decoder import load_decoder, save_decoder
from models.checkpoints.own import CARD
from models.decoder.model import Decoder, DecoderConfig
from models.training.cards import Card, collected, render, table
from models.training.config import ConfigError, TrainingConfig
from models.training.corpus import SOURCES, Tokens
from models.training.curves import draw_bits
from models.training.optimisation import learning_rate, optimizer_of, untrained
from models.training.task import Loss, Progress, Report, Task
from models.training.text.evaluation import evaluate, first
from models.training.text.packing import Packing

WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TextTask(Task):
    """The training of a decoder on text. Raises ValueError if the text does not fill one batch."""

    loss_steps = 10
    model: Decoder

    def __init__(self, config: TrainingConfig, tokens: Tokens, model: Decoder) -> None:
        self.name, self.budget, self.config, self.tokens = config.name, config.budget, config, tokens
        self.batches = Packing(tokens.train, context=config.context, batch=config.batch, seed=config.seed, document=tokens.document)
        self.sample = first(tokens.held_out, config.evaluation_kb * 1000)
        self.model, self.optimizer = model.train(), optimizer_of(model, config)
        self.device = next(model.parameters()).device

    def learning_rates(self, step: int, share: float) -> list[float]:
        return [learning_rate(share, self.config)] * len(self.optimizer.param_groups)

    def loss(self, step: int) -> Loss:
        """Compute the cross-entropy in nats per token. On a GPU, matrix products are computed in bfloat16, and weights are float32."""
        redraw_features(self.model, step)
        tokens, targets = (part.to(self.device) for part in self.batches(step))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits, _ = self.model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return Loss(loss + commitment_loss(self.model), loss, tokens.numel())

    def after_step(self) -> None:
        update_codebooks(self.model)

    def figures(self, loss: float) -> dict[str, float]:
        return {"bits_per_byte": loss / math.log(2) / self.tokens.bytes_per_token}

    def evaluate(self) -> dict[str, float]:
        return {"bits_per_byte": evaluate(self.model, self.sample, end_of_text=self.tokens.end_of_text).overall}

    def describe(self, progress: Progress) -> list[str]:
        words = []
        if progress.losses:
            bits = progress.losses[-1]["bits_per_byte"]
            words.append(f"loss {bits * math.log(2) * self.tokens.bytes_per_token:.3f} = {bits:.3f} bits/byte")
        if progress.evaluations:
            words.append(f"held-out {progress.evaluations[-1]['bits_per_byte']:.3f}")
        return words

    def facts(self) -> Report:
        tokens = self.tokens
        return {
            "config": self.config.model_dump(mode="json"),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "data": {"train_tokens": len(tokens.train), "train_bytes": tokens.train_bytes, "train_sha256": tokens.train_sha256},
        }

    def plot(self, report: Report, out: Path) -> None:
        draw_bits(report, out / "loss.png")

    def finish(self, out: Path, report: Report) -> str:
        self.save(out, self.model.cpu().to(WEIGHTS[self.config.weights]))
        written = load_decoder(out, dtype=torch.float32).model.to(self.device)
        report["held_out"] = self._bits_per_byte(written)
        (out / SOURCES).write_text(json.dumps(self.tokens.sources, indent=1) + "\n")
        (out / CARD).write_text(render(self.card(report), report), encoding="utf-8")
        return f"{report['held_out']['carried']['overall']:.3f} bits per byte of held-out text"

    def save(self, out: Path, model: Decoder) -> None:
        """Write the checkpoint. Its tokenizer does not put <|endoftext|> before a prompt, because training sequences begin anywhere in a
        text.
        """
        end = self.tokens.end_of_text
        tokenizer = self.tokens.tokenizer_file.read_text(encoding="utf-8")
        save_decoder(out, model, tokenizer=tokenizer, eos_token_ids=(end,), bos_token_id=end)

    def card(self, report: Report) -> Card:
        config, model, held_out = report["config"], report["config"]["model"], report["held_out"]
        layers = model["layers"] if isinstance(model["layers"], str) else ", ".join(model["layers"])
        windows = held_out["windows"]
        rows = [(name, f"{bits:.3f}", f"{windows['packages'][name]:.3f}") for name, bits in held_out["carried"]["packages"].items()]
        rows.append(("**all**", f"**{held_out['carried']['overall']:.3f}**", f"**{windows['overall']:.3f}**"))
        return Card(
            tags=["python", "text-generation"],
            languages=["code", "en"],
            about=f"""A decoder of {report["parameters"] / 1e6:.2f} million parameters that continues Python source:
{model["n_layers"]} blocks of width {model["d_model"]}, {model["n_heads"]} heads, layers `{layers}`; byte-level BPE with
{config["vocab_size"]:,} tokens. Weights in {config["weights"]}.

Intended use: trying out and testing a server of constant-size states. It is far too small to help with programming.""",
            figures=[
                f"""## Bits per byte

Of {held_out["bytes"]:,} bytes in packages of which nothing was trained on. *Carried*: the past of the whole document. *Windows*: no more of
it than in training, {config["context"]} tokens at most.

{table(("package", "carried", "windows"), rows)}

![Bits per byte against tokens and minutes](loss.png)"""
            ],
            data=collected(self.tokens.sources),
            limits=[
                f"It was trained on sequences of {config['context']} tokens and did not learn to use text from further back.",
                "It invents names that do not exist, may repeat training text, and does not follow instructions.",
            ],
        )

    def _bits_per_byte(self, model: Decoder) -> dict[str, Any]:
        """Evaluate all held-out text: `carried` keeps the state in a document, `windows` resets it every `context` tokens."""
        read = partial(evaluate, model, self.tokens.held_out, end_of_text=self.tokens.end_of_text)
        carried, windows = read(), read(context=self.config.context)
        return {
            "bytes": carried.size_bytes,
            "tokens": carried.n_tokens,
            "carried": {"overall": carried.overall, "packages": carried.packages},
            "windows": {"overall": windows.overall, "packages": windows.packages},
        }


def build(config: TrainingConfig, config_file: Path) -> Decoder:
    """Return an untrained decoder with parameters drawn from the seed. Raises ConfigError if the shape is not possible."""
    layers = config.model.get("layers")
    shape = config.model | ({"layers": tuple(layers)} if isinstance(layers, list) else {})
    model = untrained(lambda: Decoder(DecoderConfig(vocab_size=config.vocab_size, **shape)), shape, config_file, seed=config.seed)
    longest = model.config.n_positions
    if longest is not None and config.context > longest:
        raise ConfigError(f"{config_file}: context={config.context} is more than n_positions={longest}; shorten one, or enlarge the other")
    if config.chunk is not None:
        for module in model.modules():
            if isinstance(module, CausalLayer):
                module.recurrence = partial(chunkwise, chunk=config.chunk)
    return model
