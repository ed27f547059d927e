"""A served encoder, reranker or classifier. The routes of all dialects get their vectors and scores from `Model.answer`."""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from export import contract
from service.call import WARNINGS_HEADER, Call, expect
from service.encoding.queue import EncoderLimits
from service.encoding.request import EncodeAnswer, EncodeRequest, EncodeTask, OnRow, RowOrError
from service.encoding.selftest import SelfTest
from service.encoding.space import SPACE_HEADER, check_space, space_of
from service.encoding.sparse import MOST_WEIGHTS, QueryTable
from service.encoding.token_matrix import matrix_of
from service.errors import BatchTooLarge, EmptyInput, InputTooLong, InvalidRequest, NeverFits, NotReady, Overloaded, ServiceError
from service.overload.byte_shares import ByteShares
from service.runtime.engine_protocol import Engine
from service.runtime.lanes import Lane
from service.settings import Settings
from service.telemetry.metrics import Metrics, ModelMetrics
from service.tokenization.texts import Cut, Encoded, Input, TextEncoder, size_of
from service.tokenization.threads import LONG_CHARACTERS, Tokenizers

_UNCOMPUTED = (Overloaded, NeverFits, NotReady)  # errors of an engine that has computed nothing, so no tokens are charged
_CUT, _NO_CUT = Cut(side="right"), Cut(side="none")


class Encoder(Engine, Protocol):
    """The interface of an encoder's engine, in this process (`service/encoding/engine.py`) or in a pool of replicas."""

    limits: EncoderLimits

    def check(self, lane: Lane, client: str = ..., content: int = ...) -> None: ...

    async def run(self, task: EncodeTask) -> list[RowOrError]: ...

    async def probe(self, inputs: Sequence[Encoded], output: str, deadline: float) -> None: ...


class Model:
    """A loaded model that computes vectors or scores. All routes call `answer`."""

    engine: Encoder
    provider: str  # ONNX Runtime's execution provider
    selftest: SelfTest
    chat_prompts = None

    def __init__(
        self,
        bundle: Path,
        manifest: contract.Manifest,
        settings: Settings,
        metrics: Metrics,
        tokenizers: Tokenizers,
        answer_shares: ByteShares,
    ) -> None:
        self.bundle = bundle
        self.manifest = manifest
        self.name = manifest.name
        self.settings = settings
        self.metrics = ModelMetrics(metrics, self.name)
        self.texts = TextEncoder(
            bundle / contract.TOKENIZER,
            max_tokens=manifest.limits.max_tokens,
            vocab_size=manifest.limits.vocab_size,
            pair_types=any(tensor.name == contract.TOKEN_TYPE_IDS for tensor in manifest.graph.inputs),
            prompts=manifest.prompts,
            default_prompt=manifest.default_prompt,
            roles=manifest.roles,
            allow_special_tokens=settings.allow_special_tokens,
            any_pattern=settings.any_tokenizer_pattern,
        )
        self._shapes = {tensor.name: tensor.shape for tensor in manifest.graph.outputs}
        self.tokenizers = tokenizers
        self._answers = answer_shares
        self.gives_means: bool | None = None  # whether a vector is the mean of its token vectors; None: not tested yet
        about = manifest.sparse
        table = None if about is None else about.query_table
        self._query_table = None if about is None or table is None else QueryTable(bundle / table, about.size)
        self._space_ids: dict[tuple[str, int | None], str] = {}  # by output and dimensions, so bounded by the width

    @property
    def output(self) -> str:
        """Return the name of the graph output that is computed by default."""
        return self.manifest.default_tensor

    @property
    def tokenizer(self) -> Tokenizer:
        return self.texts.tokenizer

    def described(self) -> dict[str, Any]:
        """Return, as JSON values, the properties of this model that a gateway cannot read from the bundle."""
        selftest = {name: value for name, value in asdict(self.selftest).items() if value is None or math.isfinite(value)}
        return {"selftest": selftest, "limits": asdict(self.engine.limits)}

    async def probe(self, deadline: float) -> None:
        """Run the model on a short text. Raises the engine's error if the run fails."""
        encoded = self.texts.encode(["ready?"], cut=Cut())
        await self.engine.probe([item for item in encoded if isinstance(item, Encoded)], self.output, deadline)

    def tensors(self, outputs: Sequence[contract.Output], *, normalize: bool = True, param: str = "outputs") -> tuple[str, ...]:
        """Return the graph's output for each of `outputs`. Raises InvalidRequest, with the name of the field `param`, if the model has not
        all of them, or if one is there twice.
        """
        has = self.manifest.outputs
        if missing := [output for output in outputs if output not in has]:
            raise InvalidRequest(
                f"model {self.name} gives no {missing[0]!r}; it gives: {', '.join(has)}. Ask for these, or choose another model",
                param=param,
            )
        if not outputs or len(set(outputs)) < len(outputs):
            raise InvalidRequest(f"`{param}` needs at least one output, and each once. Given: {', '.join(outputs) or 'none'}", param=param)
        return tuple([contract.POOLED if each == "dense" and not normalize else self.manifest.tensor_of(each) for each in outputs])

    def vector_output(self, normalize: bool) -> str:
        """Return the graph's output for one vector of a text. Raises InvalidRequest if the model has none."""
        return self.tensors(["dense"], normalize=normalize, param="model")[0]

    async def answer(self, request: EncodeRequest, call: Call, on_row: OnRow | None = None) -> EncodeAnswer:
        """Compute a row (a vector or scores) for each input. Raises the first error, but if `call.item_errors`, returns errors as rows.

        Calls `on_row` with each row as soon as it is computed, and at the end with the errors of inputs that could not be tokenised.
        """
        call.model = self.name
        inputs, outputs = request.inputs, request.outputs or (self.output,)
        self.check_size(len(inputs))
        spaces = self._spaces(request.named or outputs, request.row_width, call)
        if call.lane is None:
            call.lane = Lane.BULK if len(inputs) > self.settings.bulk_inputs else Lane.INTERACTIVE
        if request.queries is None and request.prompt is None:
            self.warn_of_roles(call)
        looked_up = self._looked_up(outputs)
        if request.queries != len(inputs) or outputs != looked_up:
            self.engine.check(call.lane, call.client, call.content)  # before tokenising, which would be wasted for a refused request
        encoded = await self._encode(request, call)
        _raise_first(encoded, call)
        places = [at for at, item in enumerate(encoded) if isinstance(item, Encoded)]
        good = [item for item in encoded if isinstance(item, Encoded)]
        answer = EncodeAnswer([], encoded, ",".join(spaces))
        call.report(answer.truncated)
        self._expect(call, request, outputs, [len(item.ids) for item in good])
        call.tokens += answer.n_tokens  # tokens are counted before the run, so that a client that disconnects early is charged too

        def compared(at: int, row: RowOrError) -> RowOrError:
            """Return the row of a good input with the token matrix of those tokens that are compared."""
            about = self.manifest.multivector
            if about is None or isinstance(row, ServiceError) or contract.MULTIVECTOR not in outputs:
                return row
            role: contract.RoleName = "query" if places[at] < (request.queries or 0) else "document"
            k = outputs.index(contract.MULTIVECTOR)
            return *row[:k], matrix_of(row[k], good[at].ids, about, role), *row[k + 1 :]

        given = on_row and (lambda index, row: on_row(places[index], compared(index, row)))
        n_queries = sum(at < (request.queries or 0) for at in places) if looked_up else 0
        try:
            if n_queries:
                computed = await self._with_looked_up(good, n_queries, outputs, looked_up, call, given)
            else:
                computed = await self._run(good, outputs, call, given)
        except _UNCOMPUTED:
            call.tokens -= answer.n_tokens
            raise
        _raise_first(computed, call)
        rows = map(compared, itertools.count(), computed)
        answer.rows = [item if isinstance(item, ServiceError) else next(rows) for item in encoded]
        if on_row:  # only after the run, because a refused request must get an error status before the first line of a stream is sent
            for at, item in enumerate(encoded):
                if isinstance(item, ServiceError):
                    on_row(at, item)
        return answer

    def answer_without_inputs(self, outputs: Sequence[str], size: int, call: Call) -> EncodeAnswer:
        """Return the empty answer to a request that brings all its `size` vectors. Raises SpaceMoved if they are of another space."""
        call.model = self.name
        self.check_size(size)
        return EncodeAnswer([], [], ",".join(self._spaces(outputs, None, call)))

    def warn_of_roles(self, call: Call) -> None:
        """Tell a client that named no role if it matters to this model."""
        roles = self.manifest.roles or {}
        if any(self.manifest.prompts.values()) or roles.get("query") != roles.get("document"):
            call.headers[WARNINGS_HEADER] = (
                f"{self.name} writes queries and documents differently, and the request does not say which these are: send input_type"
            )

    def _looked_up(self, outputs: Sequence[str]) -> tuple[str, ...]:
        """Return those of the outputs that queries have from a table, without the graph."""
        weights = self.manifest.tensor_of("sparse")
        return (weights,) if self._query_table is not None and weights in outputs else ()

    async def _run(self, inputs: Sequence[Encoded], outputs: tuple[str, ...], call: Call, on_row: OnRow | None) -> list[RowOrError]:
        task = EncodeTask(inputs=inputs, outputs=outputs, content=call.content, spent=call.spent, **call.origin, on_row=on_row)
        return await self.engine.run(task)

    async def _with_looked_up(
        self,
        inputs: Sequence[Encoded],
        queries: int,
        outputs: tuple[str, ...],
        looked_up: tuple[str, ...],
        call: Call,
        on_row: OnRow | None,
    ) -> list[RowOrError]:
        """Return the rows of inputs, of which the first ones are `queries` queries, whose sparse vectors are from the table."""
        assert self._query_table is not None
        vectors = [self._query_table.vector(set(item.ids) - self.texts.special_ids) for item in inputs[:queries]]
        at, computed = outputs.index(looked_up[0]), tuple([output for output in outputs if output not in looked_up])

        def whole(index: int, row: RowOrError) -> RowOrError:
            return row if isinstance(row, ServiceError) else (*row[:at], vectors[index], *row[at:])

        async def of_queries() -> list[RowOrError]:
            if computed:
                given = on_row and (lambda index, row: on_row(index, whole(index, row)))
                return list(map(whole, itertools.count(), await self._run(inputs[:queries], computed, call, given)))
            rows = [whole(index, ()) for index in range(queries)]
            if on_row:
                for index, row in enumerate(rows):
                    on_row(index, row)
            return rows

        async def of_documents() -> list[RowOrError]:
            given = on_row and (lambda index, row: on_row(queries + index, row))
            return await self._run(inputs[queries:], outputs, call, given) if len(inputs) > queries else []

        rows, others = await asyncio.gather(of_queries(), of_documents())
        return rows + others

    def _spaces(self, outputs: Sequence[str], dimensions: int | None, call: Call) -> list[str]:
        """Return the embedding space of each output, and name it in the answer's headers. Raises SpaceMoved if the client wants another."""
        if not self.manifest.traits.gives_vectors:
            return []
        spaces = []
        for output in outputs:
            key = output, dimensions if output in (contract.EMBEDDING, contract.POOLED) else None
            if key not in self._space_ids:
                self._space_ids[key] = space_of(self.manifest, *key)
            spaces.append(self._space_ids[key])
        if call.space is not None:
            check_space(call.space, spaces, self.name)
        call.headers[SPACE_HEADER] = ",".join(spaces)
        return spaces

    def _expect(self, call: Call, request: EncodeRequest, outputs: Sequence[str], lengths: Sequence[int]) -> None:
        """Reserve memory for the answer to inputs of these lengths (in tokens)."""
        size_bytes, parts = 0.0, []
        for output in outputs:
            count, what = self._numbers(output, request, lengths)
            size_bytes += count * request.bytes_by_output.get(output, request.number_bytes)
            parts.append(what)
        self.reserve(call, size_bytes, " and ".join(parts))

    def reserve(self, call: Call, size_bytes: float, what: str) -> None:
        """Reserve memory for about so many bytes of an answer. Raises NeverFits or Overloaded with `what`, its content in words."""
        expect(call, size_bytes, self.settings.max_answer_bytes, self._answers, what)

    def _numbers(self, output: str, request: EncodeRequest, lengths: Sequence[int]) -> tuple[int, str]:
        """Return how many numbers an answer has at most of this output, in total and in words."""
        shape = self._shapes.get(output, ())
        if output in (contract.SPARSE, contract.TOKEN_WEIGHTS):
            most = min(shape[-1] if isinstance(shape[-1], int) else max(lengths, default=0), MOST_WEIGHTS)
            return len(lengths) * most, f"{len(lengths)} inputs of up to {most} weights"
        width = shape[-1] if shape and isinstance(shape[-1], int) else self.manifest.width or 1
        if output in (contract.EMBEDDING, contract.POOLED):
            width = request.row_width or width
        rows, each = len(lengths), "inputs"
        if len(shape) > 2:
            rows, each = (len(lengths) * max(lengths, default=0), "padded tokens") if request.padded else (sum(lengths), "tokens")
        return rows * width, f"{rows} {each} of {width} numbers"

    def default_cut(self, truncate: bool | None = None) -> Cut:
        """Return the truncation for a request whose `truncate` is true, false or absent (None)."""
        wanted = self.settings.auto_truncate if truncate is None else truncate
        return _CUT if wanted else _NO_CUT

    def check_size(self, size: int) -> None:
        """Raise EmptyInput or BatchTooLarge if a request may not have `size` inputs."""
        if not size:
            raise EmptyInput("`input` cannot be empty", param="input")
        if size > self.settings.max_client_batch:
            raise BatchTooLarge(
                f"batch size {size} > maximum allowed batch size {self.settings.max_client_batch}; send it in parts", param="input"
            )

    def check_length(self, size: int, index: int) -> None:
        """Raise InputTooLong if a request may not have an input of so many characters."""
        if size > (limit := self.settings.max_input_characters):
            raise InputTooLong(f"input {index} has {size} characters and the most is {limit}: send it in parts", param="input")

    async def _encode(self, request: EncodeRequest, call: Call) -> list[Encoded | ServiceError]:
        started = time.monotonic()
        texts, cut = self.texts, request.cut or self.default_cut()
        encoded: list[Encoded | ServiceError] = []
        for start, inputs, role in _by_role(request):
            prompt = request.prompt
            if prompt is None:  # token ids get no prompt of their role; to ask for a prompt before token ids is an error
                prompt = texts.default_prompt if request.queries is None else texts.prompt_of(role)
                prompt = "" if any(isinstance(item, list) for item in inputs) else prompt
            for first, piece in self._pieces(inputs, start):
                encode = partial(texts.encode, piece, cut=cut, prompt=prompt, first=first, role=texts.roles.get(role))
                size = sum(map(size_of, piece))
                call.characters += size
                encoded += await self.tokenizers.run(encode, size=size, client=call.client)
        elapsed = time.monotonic() - started
        call.tokenization_s += elapsed
        self.metrics.tokenization.observe(elapsed)
        for item in encoded:
            if isinstance(item, Encoded):
                self.metrics.input_length.observe(len(item.ids))
                if item.truncated:
                    self.metrics.truncated.inc()
        return encoded

    def _pieces(self, inputs: Sequence[Input], start: int) -> Iterator[tuple[int, Sequence[Input]]]:
        """Split the inputs into pieces that do not count as long, each with the index of its first input. Other work runs in between. A
        long text has a piece of its own. `start` is the index of the first of `inputs` in the request.
        """
        first, characters = 0, 0
        for at, item in enumerate(inputs):
            self.check_length(size := size_of(item), start + at)
            if characters and characters + size > LONG_CHARACTERS:
                yield start + first, inputs[first:at]
                first, characters = at, 0
            characters += size
        yield start + first, inputs[first:]


def _by_role(request: EncodeRequest) -> Iterator[tuple[int, Sequence[Input], contract.RoleName]]:
    """Split a request's inputs by role, each part with the index of its first input. Without a role, texts are written as documents."""
    queries = request.queries or 0
    if queries:
        yield 0, request.inputs[:queries], "query"
    if queries < len(request.inputs):
        yield queries, request.inputs[queries:], "document"


def _raise_first(results: Sequence[object], call: Call) -> None:
    """Raise the first error among the results. If `call.item_errors`, do nothing, because the answer then contains the errors."""
    error = None if call.item_errors else next((result for result in results if isinstance(result, ServiceError)), None)
    if error is not None:
        raise error.with_traceback(None)  # without traceback, because requests with an equal input share one error object
