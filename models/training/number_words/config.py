"""The configuration of a training on number words, read from one YAML file: model shape, languages, numbers and duration."""

from typing import Any, Literal

from pydantic import Field, field_validator

from models.training.config import Optimisation
from models.training.number_words.words import LANGUAGES, MAX_DIGITS


class NumberWordsConfig(Optimisation):
    """The config of a training on number words. The budget is a number of steps and has no limit in minutes, because the step determines
    how many digits the numbers have.
    """

    kind: Literal["recurrent", "transformer"]
    model: dict[str, Any] = Field(
        description="fields of RecurrentConfig or TransformerConfig, except those of the vocabulary and the lengths"
    )
    languages: tuple[str, ...] = Field(tuple(LANGUAGES), min_length=1)
    max_digits: int = Field(MAX_DIGITS, ge=3, le=MAX_DIGITS, description="most digits of a number")
    all_digits_from: float = Field(
        0.25, ge=0, le=1, description="share of the budget in which the most digits of a number rise from 3 to max_digits"
    )
    batch: int = Field(ge=1, description="B, numbers of a step")
    max_steps: int = Field(ge=1)
    evaluation_size: int = Field(400, ge=1, description="held-out numbers of each evaluation; the last one takes more")

    @field_validator("languages")
    @classmethod
    def _known(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(languages) - LANGUAGES.keys():
            raise ValueError(f"{min(unknown)!r} is not one of {', '.join(LANGUAGES)}")
        return languages
