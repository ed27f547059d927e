"""A served decoder or encoder-decoder, with its bundle, tokenizer and engine."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
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
    """The interface of an engine of a decoder or an encoder-decoder, in this process or in a pool; see `engine.py` and
    `service/encoder_decoder/engine.py`.
    """

    @property
    def provider(self) -> str: ...

    def has_numerics(self, numerics: str) -> bool:
        """Return whether runs of this arithmetic (see `Run.numerics`) can go on in the engine or one of the pool's replicas."""
        ...

    def expecting(self, client: str, tokens: float, deadline: float) -> AbstractContextManager[None]:
        """Return a context manager in which the caller tokenises a prompt that will have about so many tokens. Raises QueueTooLong if
        other prompts take until after the deadline.
        """
        ...

    async def open(self, requests: Sequence[GenerationRequest], key: str) -> list[Run]: ...

    async def probe(self, deadline: float) -> None: ...


class Generator:
    """One bundle of a model that writes texts, loaded and tested. `engine` continues token ids; this class converts text to token ids and
    back.
    """

    engine: Generating
    chat_prompts: ChatPrompts | None = None

    def __init__(self, bundle: Path, manifest: contract.Manifest, settings: Settings, metrics: Metrics) -> None:
        self.bundle = bundle
        self.manifest = manifest
        self.name = manifest.name
        self.max_context = manifest.limits.max_tokens
        self.tokenizer = self._open_tokenizer(settings, allow_special_tokens=settings.allow_special_tokens)
        self.vocabulary = Vocabulary(bundle / contract.TOKENIZER)
        self.metrics = GeneratorMetrics(metrics, self.name)

    def _open_tokenizer(self, settings: Settings, *, allow_special_tokens: bool) -> Tokenizer:
        return open_tokenizer(
            self.bundle / contract.TOKENIZER,
            self.manifest.limits.vocab_size,
            allow_special_tokens=allow_special_tokens,
            any_pattern=settings.any_tokenizer_pattern,
        )

    @property
    def provider(self) -> str:
        """Return the name of the ONNX Runtime provider that the engine uses."""
        return self.engine.provider

    def described(self) -> dict[str, Any]:
        """Return the properties that a gateway needs and that are not in the bundle. A generator has no such properties."""
        return {}

    async def probe(self, deadline: float) -> None:
        """Generate one token, to test the engine. Raises the engine's error."""
        await self.engine.probe(deadline)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return token_ids(self.tokenizer, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        return text_of(self.tokenizer, ids)


class DecoderModel(Generator):
    """A decoder, with its chat template if it has one."""

    def __init__(self, bundle: Path, manifest: contract.Manifest, settings: Settings, metrics: Metrics) -> None:
        super().__init__(bundle, manifest, settings, metrics)
        assert manifest.decoder is not None
        self.eos_token_ids = manifest.decoder.eos_token_ids
        self.max_context = min(settings.max_prompt_tokens, manifest.decoder.n_positions or settings.max_prompt_tokens)
        if (template := self._template(manifest.decoder)) is not None:
            specials = self.tokenizer if settings.allow_special_tokens else self._open_tokenizer(settings, allow_special_tokens=True)
            self.chat_prompts = ChatPrompts(template, self.tokenizer, specials)

    def _template(self, decoder: contract.Decoder) -> ChatTemplate | None:
        if decoder.chat_template is None:
            return None
        source = contract.read_text(self.bundle, decoder.chat_template, most_bytes=contract.MOST_TEMPLATE_BYTES)
        bos, eos = decoder.bos_token_id, next(iter(decoder.eos_token_ids), None)
        bos_token, eos_token = ("" if at is None else self.vocabulary[at].decode(errors="replace") for at in (bos, eos))
        return ChatTemplate(source, model=self.name, bos_token=bos_token, eos_token=eos_token)
