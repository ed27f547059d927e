"""A served encoder-decoder: its bundle, its tokenizer, its engine."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from export import contract
from service.chat_template import ChatTemplate
from service.generation.text import Vocabulary
from service.metrics import GeneratorMetrics, Metrics
from service.settings import Settings
from service.writing.engine import WritingEngine, WritingLimits
from service.writing.selftest import check_golden
from service.writing.session import OnnxWritingSession

if TYPE_CHECKING:
    from service.tracing import Tracer


class WritingModel:
    """One bundle, loaded and tested. `engine` writes token ids; this turns text into ids and back."""

    chat_template: ChatTemplate | None = None

    def __init__(
        self,
        bundle: Path,
        manifest: contract.Manifest,
        settings: Settings,
        metrics: Metrics,
        *,
        threads: int,
        tracer: "Tracer | None" = None,
    ) -> None:
        assert manifest.encoder_decoder is not None
        self.bundle, self.manifest, self.name = bundle, manifest, manifest.name
        self.max_context = manifest.limits.max_tokens
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(bundle / contract.TOKENIZER))
        self.vocabulary = Vocabulary(bundle / contract.TOKENIZER)
        self.metrics = GeneratorMetrics(metrics, self.name)
        session = OnnxWritingSession(bundle, manifest, threads=threads, provider=settings.provider)
        check_golden(bundle, session)
        limits = WritingLimits(rows=max(settings.slots, 8))
        self.engine = WritingEngine(session, self.vocabulary, limits=limits, metrics=self.metrics, tracer=tracer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
