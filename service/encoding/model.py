"""A served encoder, reranker or classifier. The routes of all dialects get their vectors and scores from `Model.answer`."""

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
from service.call import Call, expect
from service.encoding.queue import EncoderLimits
from service.encoding.request import EncodeAnswer, EncodeRequest, EncodeTask, OnRow, RowOrError
from service.encoding.selftest import SelfTest
from service.encoding.space import SPACE_HEADER, check_space, space_of
from service.encoding.sparse import MOST_WEIGHTS
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
            allow_special_tokens=settings.allow_special_tokens,
            any_pattern=settings.any_tokenizer_pattern,
        )
        self._shapes = {tensor.name: tensor.shape for tensor in manifest.graph.outputs}
        self.tokenizers = tokenizers
        self._answers = answer_shares
        self.gives_means: bool | None = None  # whether a vector is the mean of its token vectors; None: not tested yet
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
        self.engine.check(call.lane, call.client, call.content)  # called before tokenising, which would be wasted for a refused request
        encoded = await self._encode(inputs, call, request.cut or self.default_cut(), request.prompt)
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
            role: contract.RoleName = "query" if places[at] < request.queries else "document"
            k = outputs.index(contract.MULTIVECTOR)
            return *row[:k], matrix_of(row[k], good[at].ids, about, role), *row[k + 1 :]

        task = EncodeTask(
            inputs=good,
            outputs=outputs,
            content=call.content,
            spent=call.spent,
            **call.origin,
            on_row=on_row and (lambda index, row: on_row(places[index], compared(index, row))),
        )
        try:
            computed = await self.engine.run(task)
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

    def _spaces(self, outputs: Sequence[str], dimensions: int | None, call: Call) -> list[str]:
        """Return the embedding space of each output, and name it in the answer's headers. Raises SpaceMoved if the client wants another."""
        if self.manifest.kind != "encoder":
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
        expect(call, size_bytes, self.settings.max_answer_bytes, self._answers, " and ".join(parts))

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

    async def _encode(self, inputs: Sequence[Input], call: Call, cut: Cut, prompt: str | None) -> list[Encoded | ServiceError]:
        started = time.monotonic()
        prefix = self.texts.default_prompt if prompt is None else prompt
        if prompt is None and prefix and any(isinstance(item, list) for item in inputs):
            prefix = ""  # token ids get no default prompt; to ask for a prompt before token ids is an error
        encoded: list[Encoded | ServiceError] = []
        for first, piece in self._pieces(inputs):
            encode, size = partial(self.texts.encode, piece, cut=cut, prompt=prefix, first=first), sum(map(size_of, piece))
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

    def _pieces(self, inputs: Sequence[Input]) -> Iterator[tuple[int, Sequence[Input]]]:
        """Split the inputs into pieces that do not count as long, each with the index of its first input. Other work runs in between. A
        long text has a piece of its own.
        """
        first, characters = 0, 0
        for at, item in enumerate(inputs):
            self.check_length(size := size_of(item), at)
            if characters and characters + size > LONG_CHARACTERS:
                yield first, inputs[first:at]
                first, characters = at, 0
            characters += size
        yield first, inputs[first:]


def _raise_first(results: Sequence[object], call: Call) -> None:
    """Raise the first error among the results. If `call.item_errors`, do nothing, because the answer then contains the errors."""
    error = None if call.item_errors else next((result for result in results if isinstance(result, ServiceError)), None)
    if error is not None:
        raise error.with_traceback(None)  # without traceback, because requests with an equal input share one error object
