"""The config of a training run, read from one YAML file: model shape, data, duration and optimisation."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import AttnserveError


class ConfigError(AttnserveError, ValueError):
    """The config is invalid. The message names the file, the key and the value."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The length of a run. A run ends when `max_steps` or `max_minutes` is reached, whichever is first."""

    max_steps: int | None = None
    max_minutes: float | None = None
    evaluations: int
    checkpoint_steps: int
    clip: float

    def share(self, step: int, seconds: float) -> float:
        """Return the used share of the budget, 0 to 1, after `step` steps that took `seconds` of training."""
        steps = step / self.max_steps if self.max_steps else 0.0
        minutes = seconds / 60 / self.max_minutes if self.max_minutes else 0.0
        return min(1.0, max(steps, minutes))


class Optimisation(BaseModel):
    """The fields that the configs of text, pictures and number words share. `optimisation.py` uses most of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="title of the model card and label of the run in plots")
    learning_rate: float = Field(gt=0, description="highest learning rate, reached after the warm-up")
    warm_up: float = Field(0.02, ge=0, lt=1, description="share of the budget in which the learning rate rises from 0")
    decay: Literal["cosine", "linear"] = "cosine"
    last_learning_rate: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of the highest")
    weight_decay: float = Field(0.1, ge=0, description="weight decay of matrices; vectors have none")
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0, description="largest norm of all gradients together")
    seed: int = 0
    evaluations: int = Field(12, ge=1, description="evaluations on held-out data, evenly over the budget")
    checkpoint_steps: int = Field(200, ge=1, description="steps between two checkpoints")
    threads: int | None = Field(None, ge=1, description="number of torch's threads on a CPU; None: torch decides")

    @property
    def budget(self) -> Budget:
        return Budget(**self.model_dump(include={field.name for field in fields(Budget)}))


class TrainingConfig(Optimisation):
    """The config of the training of a decoder, on text or pictures. Its values are checked when it is created.

    The budget is `max_steps`, `max_minutes` or both. The learning rate depends on the used share of the budget.
    """

    model: dict[str, Any] = Field(description="fields of models.decoder.model.DecoderConfig, without vocab_size")
    vocab_size: int = Field(ge=257, le=65_536)
    context: int = Field(ge=2, description="N, tokens of a training sequence")
    batch: int = Field(ge=1, description="B, sequences of a step")
    chunk: int | None = Field(None, ge=1, description="C, tokens of a chunk of the recurrence; None: the default of each kernel")
    max_steps: int | None = Field(None, ge=1)
    max_minutes: float | None = Field(None, gt=0, description="minutes of training; evaluation and checkpoints are not counted")
    weights: Literal["fp32", "bf16"] = Field("fp32", description="dtype of the written checkpoint, which the last evaluation reads")
    evaluation_kb: int = Field(100, ge=1, description="held-out text of an evaluation, in 1,000 bytes; the last one reads all of it")

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("max_steps or max_minutes must be given")
        return self


Config = TypeVar("Config", bound=BaseModel)


def read_config(file: Path, kind: type[Config]) -> Config:
    """Read and check a config. Raises ConfigError if it is not YAML, has an unknown key or has an invalid value."""
    if file.exists() and not file.is_file():  # opening a pipe would block
        raise ConfigError(f"{file} is not a regular file; models/training/configs has examples")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']} (is {e['input']!r:.80})" for e in error.errors())
        raise ConfigError(f"{file}: {problems}") from error
