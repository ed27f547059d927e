"""A decoder without weights: its state remembers every token it has seen, and its logits depend on that state alone.

`FakeSteps` is a `StepSession` whose row never depends on the rows beside it. `expected` continues a prompt the plain way, for comparison.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from export import contract
from service.generation.session import HostStates, Ids, Logits, Step, Tensor
from service.runtime.onnx import CPU
from tests.service.fakes import PATIENCE_S

VOCAB_SIZE = 300
EOS = 0


class Clock:
    """Stands for `time.perf_counter`: only the calls of fake sessions take time. So an engine that chooses by the time of its calls, as the
    size of a piece of a prompt, makes the same choices on every machine.
    """

    call_s, token_s = 50e-6, 5e-6

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


@contextmanager
def timed_by_calls(session: object) -> Iterator[None]:
    """Measure durations by `clock` if the session is a fake one."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(session, GatedSteps):
            patch.setattr("time.perf_counter", clock)
        yield


class GatedSteps:
    """A session that can be held between calls and told to fail, and that remembers what it was asked. Subclasses compute."""

    decoder: contract.Decoder
    provider = CPU

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []  # the tokens of each call, by row
        self.failures: dict[int, BaseException] = {}  # by number of the call
        self._changed = threading.Condition()
        self._permits: int | None = None  # None: no gate

    def states(self, rows: int) -> HostStates:
        return HostStates(self.decoder, rows)

    def batch(self, rows: int) -> int:
        return rows

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: HostStates, out: HostStates) -> Logits:
        raise NotImplementedError

    def bind(self, *steps: Step) -> Callable[[], None]:
        after = [None if step.then is None else step.then(slice(0, len(step.tokens))) for step in steps]

        def call() -> None:
            for step, then in zip(steps, after, strict=True):
                step.logits[:] = self.run(step.tokens, step.lengths, step.positions, step.wanted, step.states, step.out)
                if then is not None:
                    then()

        return call

    def _enter(self, tokens: Ids, lengths: Ids) -> None:
        """Begin a call: wait at the gate, and fail if this call is to fail."""
        clock.now += clock.call_s + clock.token_s * tokens.size
        with self._changed:
            number = len(self.calls)
            self.calls.append([row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)])
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._permits is None or self._permits > 0, PATIENCE_S):
                raise TimeoutError("the gate of the session was never opened")
            if self._permits is not None:
                self._permits -= 1
        if number in self.failures:
            raise self.failures[number]

    # What a test calls -------------------------------------------------------------------------------------------------------------------

    def hold(self, after: int = 0) -> None:
        """Close the gate after so many calls: more calls enter, and wait there."""
        with self._changed:
            self._permits = after

    def release(self, calls: int = 1) -> None:
        with self._changed:
            assert self._permits is not None, "hold() first"
            self._permits += calls
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def wait(self, calls: int) -> None:
        """Wait until so many calls have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= calls, PATIENCE_S)


class FakeSteps(GatedSteps):
    """Logits are a fixed random projection of the state; S <- 0.75 S + E[token], and the second state counts the tokens."""

    def __init__(self, *, n_positions: int | None = None) -> None:
        super().__init__()
        self.decoder = contract.Decoder(
            states=(
                contract.StateTensor(name="state_0_S", shape=(2, 4)),
                contract.StateTensor(name="state_0_n", shape=(1,), dtype="int64"),
            ),
            takes_positions=True,
            n_positions=n_positions,
            eos_token_ids=(EOS,),
            exact=True,
        )
        self.vocab_size = VOCAB_SIZE
        self.fingerprint = "fake"
        random = np.random.default_rng(0)
        self.embedding = random.standard_normal((VOCAB_SIZE, 2, 4)).astype(np.float32)
        self.unembedding = random.standard_normal((8, VOCAB_SIZE)).astype(np.float32)
        self.unembedding[:, EOS] = 0  # never the likeliest, so that greedy runs go on
        self.bad_tokens: set[int] = set()  # whose logits are NaN

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: HostStates, out: HostStates) -> Logits:
        self._enter(tokens, lengths)
        logits = np.zeros((*wanted.shape, VOCAB_SIZE), np.float32)
        for row in range(len(tokens)):
            S, n = (array[row].copy() for array in states.arrays)
            assert n[0] == positions[row], "the state is not of this position"
            assert self.decoder.n_positions is None or n[0] + lengths[row] <= self.decoder.n_positions, "there is no such position"
            for at, token in enumerate(tokens[row, : lengths[row]]):
                S = np.float32(0.75) * S + self.embedding[token]
                n += 1
                for place in np.flatnonzero(wanted[row] == at):
                    logits[row, place] = np.nan if int(token) in self.bad_tokens else self.logits(S)
            out.arrays[0][row], out.arrays[1][row] = S, n
        return logits

    def logits(self, S: Tensor) -> Logits:
        product: Logits = (S.reshape(8, 1) * self.unembedding).sum(0)
        return product

    def expected(self, prompt: Sequence[int], n: int) -> list[int]:
        """The likeliest continuation of n tokens."""
        S = np.zeros((2, 4), np.float32)
        for token in prompt:
            S = np.float32(0.75) * S + self.embedding[token]
        completion = []
        for _ in range(n):
            completion.append(int(self.logits(S).argmax()))
            S = np.float32(0.75) * S + self.embedding[completion[-1]]
        return completion


def byte_tokenizer(file: Path) -> Path:
    """A byte-level tokenizer of VOCAB_SIZE ids: the end of text, every byte, then pairs of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in "etaoinsh" for b in "etaoinsh"][: VOCAB_SIZE - 1 - len(alphabet)]
    vocabulary = {token: at for at, token in enumerate(["<|endoftext|>", *alphabet, *pairs])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(file))
    return file
