"""A served decoder: its bundle, its tokenizer, its engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from export import contract
from service.generation.chat.prompt import ChatPrompts
from service.generation.chat.template import ChatTemplate
from service.generation.request import GenerationRequest
from service.generation.run import Run
from service.generation.text import Vocabulary
from service.runtime.engine_protocol import Engine
from service.settings import Settings
from service.telemetry.metrics import GeneratorMetrics, Metrics
from service.tokenization.tokenizer_file import open_tokenizer, text_of, token_ids


class Generating(Engine, Protocol):
    """What a decoder or an encoder-decoder needs of its engine, wherever that is; see `engine.py` and `service/seq2seq/engine.py`."""

    @property
    def provider(self) -> str: ...

    @property
    def pending(self) -> int: ...

    @property
    def full(self) -> bool: ...

    async def open(self, requests: Sequence[GenerationRequest], key: str) -> list[Run]: ...

    async def probe(self, deadline: float) -> None: ...


class GeneratorModel:
    """One decoder bundle, loaded and tested. `engine` continues token ids; this turns text into ids and back."""

    def __init__(
        self,
        bundle: Path,
        manifest: contract.Manifest,
        settings: Settings,
        metrics: Metrics,
        open_engine: Callable[["GeneratorModel"], Generating],
    ) -> None:
        assert manifest.decoder is not None
        self.bundle = bundle
        self.manifest = manifest
        self.name = manifest.name
        self.eos_token_ids = manifest.decoder.eos_token_ids
        self.max_context = min(settings.max_prompt_tokens, manifest.decoder.n_positions or settings.max_prompt_tokens)
        file = bundle / contract.TOKENIZER
        vocab_size, allowed = manifest.limits.vocab_size, settings.allow_special_tokens
        self.tokenizer: Tokenizer = open_tokenizer(file, vocab_size, allow_special_tokens=allowed)
        self.vocabulary = Vocabulary(file)
        self.chat_prompts: ChatPrompts | None = None
        if (template := self._template(bundle, manifest.decoder)) is not None:
            specials = self.tokenizer if allowed else open_tokenizer(file, vocab_size, allow_special_tokens=True)
            self.chat_prompts = ChatPrompts(template, self.tokenizer, specials)
        self.metrics = GeneratorMetrics(metrics, self.name)
        self.engine = open_engine(self)

    @property
    def provider(self) -> str:
        """Of ONNX Runtime: where its engine computes."""
        return self.engine.provider

    def _template(self, bundle: Path, decoder: contract.Decoder) -> ChatTemplate | None:
        if decoder.chat_template is None:
            return None
        source = contract.read_text(bundle, decoder.chat_template, most_bytes=contract.MOST_TEMPLATE_BYTES)
        bos, eos = decoder.bos_token_id, next(iter(decoder.eos_token_ids), None)
        bos_token, eos_token = ("" if at is None else self.vocabulary[at].decode(errors="replace") for at in (bos, eos))
        return ChatTemplate(source, model=self.name, bos_token=bos_token, eos_token=eos_token)

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
