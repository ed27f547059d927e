"""Ranks layers by what they look up far away, to choose those that keep a longer window.

    python -m models.distillation.decoder.layers --teacher GGUF --tokens out/tokens.npz

All layers but one have the long window; that one has the short one. How many more bits does a token of a training text then take? The
layers are printed in this order, those that need the long window most first, as the tuning takes them (`--long-layers`: as many as the
state may take).
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from models.decoder.model import Decoder
from models.decoder.window import windowed
from models.distillation.decoder.next_token import token_figures
from models.distillation.decoder.parallel import in_parallel
from models.distillation.decoder.teacher import load_teacher
from models.distillation.decoder.tokens import WRITTEN_BY, read_tokens


@torch.inference_mode()
def more_bits(whole: Decoder, tokens: Tensor, *, short: int, long: int, show: Callable[[], None] = lambda: None) -> list[float]:
    """Return, for each layer of a decoder with softmax attention, how many more bits a token takes if this layer alone has a window of
    `short` tokens, and all others one of `long`. tokens (B, N). Raises ValueError unless short < long < N."""
    if not short < long < tokens.shape[1]:
        raise ValueError(f"short={short}, long={long} and texts of {tokens.shape[1]} tokens must ascend; choose shorter windows")
    far, near = (in_parallel(windowed(whole, window)) for window in (long, short))
    unembedding, seen = whole.unembedding.weight, list[tuple[Tensor, ...]]()
    hooks = [block.register_forward_pre_hook(lambda _, arguments: seen.append(arguments)) for block in far.blocks]
    expected = far(tokens, states=[{} for _ in far.blocks])[0]
    for hook in hooks:
        hook.remove()

    def bits(x: Tensor) -> float:
        return float(token_figures(x, expected, unembedding, tokens).bits.mean())

    found, least = [], bits(expected)
    for number, (x, *others) in enumerate(seen):
        x, _ = near.blocks[number](x, *others)
        for block in list(far.blocks)[number + 1 :]:
            x, _ = block(x, *others)
        found.append(bits(far.final_norm(x)) - least)
        show()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.distillation.decoder.layers", description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True, help="checkpoint folder or GGUF file of a decoder with softmax attention")
    parser.add_argument("--tokens", type=Path, required=True, help="file that `python -m models.distillation.decoder.tokens` wrote")
    parser.add_argument("--texts", type=int, default=3, help="how many Python files of the training texts to read")
    parser.add_argument("--short", type=int, default=256, help="tokens of the short window")
    parser.add_argument("--long", type=int, default=1_024, help="tokens of the long window")
    parser.add_argument("--seed", type=int, default=7, help="of the choice of texts")
    options = parser.parse_args(arguments)
    source, _ = load_teacher(options.teacher)
    tokens, console = read_tokens(options.tokens, vocab_size=source.config.vocab_size), Console()
    code = [number for number, name in enumerate(tokens.names) if name.endswith(".py")]
    if not code:
        raise SystemExit(f"{options.tokens} has no Python file; write it from other text with `{WRITTEN_BY}`")
    rows = np.random.default_rng(options.seed).permutation(code)[: options.texts]
    n = len(source.model.blocks)
    with Progress(console=console) as progress:
        task = progress.add_task("layers", total=n * len(rows))
        all_bits = [
            more_bits(
                source.model,
                torch.from_numpy(tokens.train[row : row + 1].astype(np.int64)),
                short=options.short,
                long=options.long,
                show=lambda: progress.advance(task),
            )
            for row in rows
        ]
    bits = [sum(each) / len(rows) for each in zip(*all_bits, strict=True)]
    order = sorted(range(n), key=lambda number: -bits[number])
    for number in order:
        console.print(f"layer {number}: {bits[number]:+.4f} bits a token", highlight=False)
    console.print(f"--long-layers {','.join(map(str, order))}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
