"""From a config and a data folder to a checkpoint folder that `attnserve export` takes.

OUT/
  config.json, model.safetensors, tokenizer.json   models/checkpoints/decoder.py
  README.md        the model card
  loss.png         curves, drawn anew at every evaluation
  samples.png      what a model of pictures draws
  run.json         config, curves, hardware, bits per byte: what models/training/compare.py reads
  sources.json     every package that was read, with its licence and size
  checkpoints/     what a stopped run goes on from
"""

import json
import os
import platform
import shutil
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from models.attention.layers.causal import CausalLayer
from models.attention.layers.recurrence import chunkwise
from models.checkpoints.decoder import CARD, TOKENIZER, load_decoder, save_decoder
from models.decoder.model import Decoder, DecoderConfig
from models.folders.config_fields import bounded
from models.folders.folder import CheckpointError, check_memory, in_sentences
from models.training import checkpoints
from models.training.card import model_card
from models.training.config import ConfigError, TrainingConfig, read_config
from models.training.corpus import SOURCES, Tokens, open_tokens
from models.training.display import training_bar
from models.training.evaluation import evaluate
from models.training.loop import Progress, TrainingError, stop_signals, train
from models.training.pictures.card import SAMPLES, image_card
from models.training.pictures.drawings import draw
from models.training.plot import plot
from models.training.samples import continuations
from models.training.tokenizer import beginning

RUN, CHECKPOINTS, CURVE = "run.json", "checkpoints", "loss.png"
WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(config_file: Path, data: Path, out: Path, console: Console) -> bool:
    """Train, or go on with what `out` has begun. True when the budget is used up and the model is written, False after a signal.

    Raises ConfigError, CorpusError, TokenizerError, ResumeError where `out` was begun with another config or other text, and TrainingError
    for everything else.
    """
    with in_sentences(f"training on {data} into {out} failed", TrainingError):
        return _run(config_file, data, out, console)


def _run(config_file: Path, data: Path, out: Path, console: Console) -> bool:
    config = read_config(config_file)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _prepare(device, config)
    tokens = open_tokens(data, vocab_size=config.vocab_size)
    model = build(config, config_file).to(device)
    out.mkdir(parents=True, exist_ok=True)
    report = _begin(out, config, tokens, model, device)

    def write_curves(progress: Progress) -> None:
        write_report(out, report | _curves(progress))
        plot({config.name: report | _curves(progress)}, out / CURVE, title=config.name)

    with training_bar(config.name, console) as show, stop_signals() as stopping:
        progress = train(model, tokens, config, out / CHECKPOINTS, show=show, on_evaluation=write_curves, stopping=stopping)
    report |= _curves(progress) | {"tokens_per_s": progress.step * config.batch * config.context / max(progress.seconds, 1e-9)}
    if progress.share(config) < 1:
        console.print(f"stopped after step {progress.step:,}; the same command goes on from there")
        return False
    _save(out, model.cpu().to(WEIGHTS[config.weights]), tokens)
    with console.status("reading all held-out text"):
        written = load_decoder(out, dtype=torch.float32).model.to(device)
        report["held_out"] = _last_look(written, tokens, config)
        card = _card(out, written, tokens, report)
    shutil.copyfile(data / SOURCES, out / SOURCES)
    write_report(out, report)
    (out / CARD).write_text(card, encoding="utf-8")
    console.print(f"[green]{out}[/green]: {report['held_out']['carried']['overall']:.3f} bits per byte of held-out text")
    return True


def build(config: TrainingConfig, config_file: Path) -> Decoder:
    """The untrained decoder, drawn from the seed. Raises ConfigError for a shape that cannot be."""
    layers = config.model.get("layers")
    shape = config.model | ({"layers": tuple(layers)} if isinstance(layers, list) else {})
    try:
        bounded(shape)
        asked = DecoderConfig(vocab_size=config.vocab_size, **shape)
        with torch.device("meta"):
            check_memory(config_file, Decoder(asked))
        torch.manual_seed(config.seed)
        model = Decoder(asked)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{config_file}: model: {error}") from error
    longest = model.config.n_positions
    if longest is not None and config.context > longest:
        raise ConfigError(f"{config_file}: context={config.context} is more than n_positions={longest}; shorten one, or enlarge the other")
    if config.chunk is not None:
        for module in model.modules():
            if isinstance(module, CausalLayer):
                module.recurrence = partial(chunkwise, chunk=config.chunk)
    return model


def _prepare(device: torch.device, config: TrainingConfig) -> None:
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    elif config.threads is not None:
        torch.set_num_threads(config.threads)


def _begin(out: Path, config: TrainingConfig, tokens: Tokens, model: Decoder, device: torch.device) -> dict[str, Any]:
    """What run.json says from the beginning. Raises ResumeError where it says otherwise already."""
    report = {
        "name": config.name,
        "config": config.model_dump(mode="json"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": {"train_tokens": len(tokens.train), "train_bytes": tokens.train_bytes, "train_sha256": tokens.train_sha256},
        "hardware": hardware(device),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    if checkpoints.newest(out / CHECKPOINTS):
        earlier = checkpoints.read_json(out / RUN)
        for key in ("config", "data"):
            changed = [name for name, value in report[key].items() if earlier[key].get(name) != value]
            if changed:
                raise checkpoints.ResumeError(f"{out} was begun with another {key}: {', '.join(changed)}; take another --out")
        return earlier
    write_report(out, report | _curves(Progress()))
    return report


def _save(out: Path, model: Decoder, tokens: Tokens) -> None:
    """Pictures were seen from <|endoftext|> on, and so begin with it; texts were cut anywhere."""
    end = tokens.end_of_text
    tokenizer = tokens.tokenizer_file.read_text(encoding="utf-8")
    if tokens.image is not None:
        tokenizer = beginning(Tokenizer.from_str(tokenizer)).to_str(pretty=True)
    save_decoder(out, model, tokenizer=tokenizer, eos_token_ids=(end,), bos_token_id=end, image=tokens.image)


def _card(out: Path, model: Decoder, tokens: Tokens, report: dict[str, Any]) -> str:
    """With what the model writes, or draws into `out`."""
    if tokens.image is None:
        return model_card(report, tokens.sources, continuations(model, tokens.tokenizer_file, end_of_text=tokens.end_of_text))
    draw(model, tokens.image, out / TOKENIZER, out / SAMPLES)
    return image_card(report, tokens.sources)


def _last_look(model: Decoder, tokens: Tokens, config: TrainingConfig) -> dict[str, Any]:
    """Bits per byte of all held-out text: with the past carried on through a document, and with no more of it than in training."""
    look = partial(evaluate, model, tokens.held_out, end_of_text=tokens.end_of_text)
    carried, windows = look(), look(context=config.context)
    return {
        "bytes": carried.size_bytes,
        "tokens": carried.n_tokens,
        "carried": {"overall": carried.overall, "packages": carried.packages},
        "windows": {"overall": windows.overall, "packages": windows.packages},
    }


def _curves(progress: Progress) -> dict[str, Any]:
    return {"losses": [vars(point) for point in progress.losses], "evaluations": [vars(point) for point in progress.evaluations]}


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.is_file()
        else []
    )
    return f"{names[0] if names else platform.machine()}, torch threads: {torch.get_num_threads()}"


def write_report(out: Path, report: dict[str, Any]) -> None:
    """run.json, whole or as it was."""
    unfinished = out / f"{RUN}.unfinished"
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(unfinished, out / RUN)
