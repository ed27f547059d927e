"""What a training run is, as one YAML file: the decoder's shape, what it sees, for how long, and how it is optimised."""

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attnserve.errors import AttnserveError


class ConfigError(AttnserveError, ValueError):
    """A config that cannot be run: the message names the file, the key and the value."""


class Optimisation(BaseModel):
    """How any model is optimised; see `optimisation.py`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="title of the model card and of the run's lines in plots")
    learning_rate: float = Field(gt=0, description="the highest")
    warm_up: float = Field(0.02, ge=0, lt=1, description="share of the budget in which the learning rate rises from 0")
    decay: Literal["cosine", "linear"] = "cosine"
    last_learning_rate: float = Field(0.0, ge=0, le=1, description="at the end, as a share of the highest")
    weight_decay: float = Field(0.1, ge=0, description="on matrices; vectors have none")
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0, description="largest norm of all gradients together")
    seed: int = 0
    evaluations: int = Field(12, ge=1, description="looks at what is held out, evenly over the budget")
    checkpoint_steps: int = Field(200, ge=1)
    threads: int | None = Field(None, ge=1, description="of torch on a CPU; None: its own choice")


class TrainingConfig(Optimisation):
    """Checked on creation. The budget is `max_steps`, `max_minutes` or both, whichever ends first; the learning rate follows its share."""

    model: dict[str, Any] = Field(description="fields of models.decoder.model.DecoderConfig, without vocab_size")
    vocab_size: int = Field(ge=257, le=65_536)
    context: int = Field(ge=2, description="N, tokens of a training sequence")
    batch: int = Field(ge=1, description="B, sequences of a step")
    chunk: int | None = Field(None, ge=1, description="C of the recurrence; None: the kernel's own choice")
    max_steps: int | None = Field(None, ge=1)
    max_minutes: float | None = Field(None, gt=0, description="of training; evaluation and checkpoints come on top")
    weights: Literal["fp32", "bf16"] = Field("fp32", description="in which the result is written; evaluated as written")
    evaluation_kb: int = Field(100, ge=1, description="1,000 bytes of held-out text for each look; the last one takes all of it")

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("max_steps or max_minutes must be given")
        return self


Config = TypeVar("Config", bound=Optimisation)


def read_config(file: Path, kind: type[Config] = TrainingConfig) -> Config:
    """Raises ConfigError for a file that is not YAML, an unknown key and a value out of range."""
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise ConfigError(f"{file} is no regular file; models/training/configs has examples")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']} (is {e['input']!r:.80})" for e in error.errors())
        raise ConfigError(f"{file}: {problems}") from error
