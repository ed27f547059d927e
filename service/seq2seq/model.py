"""A served encoder-decoder: its bundle, its tokenizer, its engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from export import contract
from service.generation.chat.prompt import ChatPrompts
from service.generation.model import Generating
from service.generation.text import Vocabulary
from service.settings import Settings
from service.telemetry.metrics import GeneratorMetrics, Metrics
from service.tokenization.tokenizer_file import open_tokenizer, text_of, token_ids


class WritingModel:
    """One bundle, loaded and tested. `engine` writes token ids; this turns text into ids and back."""

    chat_prompts: ChatPrompts | None = None

    def __init__(
        self,
        bundle: Path,
        manifest: contract.Manifest,
        settings: Settings,
        metrics: Metrics,
        open_engine: Callable[["WritingModel"], Generating],
    ) -> None:
        assert manifest.encoder_decoder is not None
        self.bundle, self.manifest, self.name = bundle, manifest, manifest.name
        self.max_context = manifest.limits.max_tokens
        self.tokenizer: Tokenizer = open_tokenizer(
            bundle / contract.TOKENIZER, manifest.limits.vocab_size, allow_special_tokens=settings.allow_special_tokens
        )
        self.vocabulary = Vocabulary(bundle / contract.TOKENIZER)
        self.metrics = GeneratorMetrics(metrics, self.name)
        self.engine = open_engine(self)

    @property
    def provider(self) -> str:
        """Of ONNX Runtime: where its engine computes."""
        return self.engine.provider

    def described(self) -> dict[str, Any]:
        """What a gateway needs to know of this model beside its bundle: nothing."""
        return {}

    async def probe(self, deadline: float) -> None:
        """Compute something short. Raises what the engine raises."""
        await self.engine.probe(deadline)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return token_ids(self.tokenizer, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        return text_of(self.tokenizer, ids)
