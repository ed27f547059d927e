"""A decoder without a model, whose engine says what its script says (`scripted_engine.py`), and an application around it."""

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from export import contract
from service.app import Application, build_app
from service.catalog import Catalog
from service.errors import WrongKind
from service.generation.chat.prompt import ChatPrompts
from service.generation.chat.template import ChatTemplate
from service.generation.sampling.grammar import Grammars
from service.generation.text import Vocabulary
from service.settings import Settings
from service.states.blob import unpack
from service.states.opening import open_store
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.service import fakes
from tests.service.scripted_engine import STATES, ScriptedEngine, ScriptedSteps, seen_in

BOS, EOS = 0, 1
SAID = "Once upon a time, there was a café."
TEMPLATE = """{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + TEMPLATE
CALL_TEMPLATE = TOOL_TEMPLATE.replace(
    "{{ message.content }}",
    """{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}""",
)


def byte_tokenizer(*, bos: bool = True) -> Tokenizer:
    """Every byte is a token, after `<s>` and `</s>`; with `bos`, `<s>` stands before every text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": BOS, "</s>": EOS, **{letter: at + 2 for at, letter in enumerate(letters)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


class FakeGenerator:
    """What `service/generation/model.py` is to the routes."""

    def __init__(
        self, name: str, *, template: str | None = TEMPLATE, kind: contract.Kind = "decoder", bos: bool = True, prefix_cache_bytes: int = 0
    ) -> None:
        self.name = name
        self.created = 1_767_323_045
        self.tokenizer = byte_tokenizer(bos=bos)
        self.vocabulary, grammars = _read(bos)
        self.manifest = _manifest(name, kind, self.tokenizer.get_vocab_size(), BOS if bos else None)
        self.metrics = GeneratorMetrics(Metrics(), name)
        assert self.manifest.decoder is not None
        steps = ScriptedSteps(self.manifest.decoder, self.tokenizer.get_vocab_size(), self.manifest.fingerprint)
        self.engine = ScriptedEngine(
            steps,
            self.vocabulary,
            grammars,
            self.metrics,
            encode=partial(self.encode, add_special_tokens=False),
            script=SAID,
            prefix_cache_bytes=prefix_cache_bytes,
        )
        specials = byte_tokenizer(bos=bos)
        self.tokenizer.encode_special_tokens = True
        self.chat_prompts = ChatPrompts(_chat_template(template), self.tokenizer, specials) if template is not None else None
        self.max_context: int | None = 131_072
        self.provider = "CPUExecutionProvider"
        self.eos_token_ids = (EOS,)

    def need(self, *kinds: str) -> None:
        if self.manifest.kind not in kinds:
            raise WrongKind(f"model {self.name} is of kind {self.manifest.kind}; this route needs: {', '.join(kinds)}", param="model")

    def described(self) -> dict[str, Any]:
        return {}

    async def probe(self, deadline: float) -> None:
        await self.engine.probe(deadline)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def text_of(self, state: bytes) -> str:
        """Everything that a state has seen, by its blob."""
        assert self.manifest.decoder is not None
        blob = unpack(state, self.manifest.decoder, self.manifest.limits.vocab_size, self.manifest.fingerprint)
        return self.decode(seen_in(blob.tensors[1]))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


@cache
def _chat_template(source: str) -> ChatTemplate:
    """Each has a process of its own, which takes a tenth of a second to start."""
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


@cache
def _read(bos: bool) -> tuple[Vocabulary, Grammars]:
    """What engines read from a tokenizer, once for all of them."""
    with TemporaryDirectory() as folder:
        byte_tokenizer(bos=bos).save(file := f"{folder}/tokenizer.json")
        return Vocabulary(Path(file)), Grammars(Path(file), (EOS,))


def _manifest(name: str, kind: contract.Kind, vocab_size: int, bos: int | None) -> contract.Manifest:
    return contract.Manifest(
        name=name,
        kind=kind,
        precision="fp32",
        files=(),
        graph=contract.Graph(file=contract.GRAPH, opset=20, inputs=(), outputs=(), operators={}, optimisation="none"),
        limits=contract.Limits(max_tokens=131_072, vocab_size=vocab_size),
        source=contract.CheckpointSource(
            architecture="Fake", checkpoint="fake", weights_sha256="0" * 64, attention="linear", untrained=False
        ),
        parity=contract.Parity(max_abs_error=0.0, min_cosine=1.0, shapes=((1, 2),), tolerance=1e-5),
        decoder=contract.Decoder(states=STATES, takes_positions=False, bos_token_id=bos, eos_token_ids=(EOS,), exact=True),
        width=8,
        created="2026-01-02T03:04:05+00:00",
        tool="fakes",
    )


class FakeGeneratorCatalog(Catalog):
    """A catalog that has nothing to load."""

    def __init__(self, generators: Sequence[FakeGenerator], settings: Settings) -> None:
        super().__init__(settings)
        self._generators = generators

    def load(self) -> None:
        models: dict[str, Any] = {generator.name: generator for generator in self._generators}
        self.models = models
        self.states = open_store(self.settings.states)
        for generator in self._generators:
            generator.engine.states = self.states

    def generator(self, name: str | None) -> Any:
        return self.find(name, "decoder")


def generator_app(*generators: FakeGenerator, **settings: Any) -> Application:
    """The application over these decoders, its catalog at `app.state.catalog`, themselves by name at `app.state.generators`."""
    make: type[FakeGeneratorCatalog] = FakeGeneratorCatalog
    if fakes.pooled:
        from tests.service.pool_fakes import FakeGeneratorGateway as make  # type: ignore[no-redef]
    catalog = make(generators, Settings(**{"threads": 1, "stream_interval_s": 0, **settings}))
    app = build_app(catalog)
    app.state.catalog = catalog
    app.state.generators = {generator.name: generator for generator in generators}
    return app


def events(stream: str) -> list[Any]:
    """The data of each event, `[DONE]` as the text it is. Comments are left out."""
    blocks = stream.split("\n\n")
    assert blocks.pop() == "", "the last event ends with an empty line"
    found = []
    for block in blocks:
        lines = [line for line in block.split("\n") if not line.startswith((":", "id: ", "retry: "))]
        if not lines:
            continue
        *kind, data = lines
        assert data.startswith("data: ")
        content = data.removeprefix("data: ")
        found.append(content if content == "[DONE]" else json.loads(content))
        assert kind in ([], [f"event: {found[-1]['type']}" if kind else ""])
    return found
