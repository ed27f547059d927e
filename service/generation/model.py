"""A served decoder: its bundle, its tokenizer, its engine."""

from pathlib import Path

from tokenizers import Tokenizer

from export import contract
from service.chat_template import ChatTemplate
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.grammar import Grammars
from service.generation.selftest import check_golden
from service.generation.session import StepSession
from service.generation.text import Vocabulary
from service.metrics import GeneratorMetrics, Metrics
from service.settings import Settings


class GeneratorModel:
    """One decoder bundle, loaded and tested. `engine` continues token ids; this turns text into ids and back."""

    def __init__(self, bundle: Path, manifest: contract.Manifest, session: StepSession, settings: Settings, metrics: Metrics) -> None:
        assert manifest.decoder is not None
        self.bundle = bundle
        self.manifest = manifest
        self.name = manifest.name
        self.eos_token_ids = manifest.decoder.eos_token_ids
        self.max_context = settings.max_prompt_tokens
        file = bundle / contract.TOKENIZER
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self.vocabulary = Vocabulary(file)
        self.chat_template = self._template(bundle, manifest.decoder)
        check_golden(bundle, session)
        self.metrics = GeneratorMetrics(metrics, self.name)
        self.engine = GeneratorEngine(
            session,
            self.vocabulary,
            eos_token_ids=self.eos_token_ids,
            grammars=Grammars(file, self.eos_token_ids),
            limits=GeneratorLimits(slots=settings.slots, max_prompt_tokens=settings.max_prompt_tokens),
            metrics=self.metrics,
        )

    def _template(self, bundle: Path, decoder: contract.Decoder) -> ChatTemplate | None:
        if decoder.chat_template is None:
            return None
        source = (bundle / decoder.chat_template).read_text(encoding="utf-8")
        bos, eos = decoder.bos_token_id, next(iter(decoder.eos_token_ids), None)
        bos_token, eos_token = ("" if at is None else self.vocabulary[at].decode() for at in (bos, eos))
        return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
