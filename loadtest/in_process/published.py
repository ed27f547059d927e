"""Measures a published decoder with a window beside transformers and llama.cpp, on the same weights, in turns.

`python -m loadtest.in_process.published --bundle bundles/smollm2 --gguf FILE --llama PYTHON` prints tokens a second, as medians of the
rounds. transformers computes in fp32, with the weights of the file. Prompts are random tokens. PYTHON is an interpreter that has xllamacpp,
llama.cpp's server in a wheel (`python3 -m venv out/llama && out/llama/bin/pip install xllamacpp`); without `--llama` its rows are left out.
It computes with the weights as they are in the file, and in 8 bits.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from loadtest.in_process import engine
from loadtest.in_process.steps import median_s, open_steps, stepping

PROMPT_TOKENS = 1000
NEW_TOKENS = 128
BATCHES = (1, 8)
FAR = (2_000, 100_000)  # positions beyond the window at which a step must take the same time
SHORT = 127  # tokens of a sequence whose state is small beside the weights
READ_BYTES = 1 << 28  # more than the caches of a CPU have

# What an interpreter with xllamacpp runs. It prints tokens a second of a prompt, and of 1 and 8 texts after short prompts. Each text has a
# slot of its own, as in llama.cpp's server, and the time counts from the first prompt to the last token.
_LLAMA = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
import xllamacpp
file, threads, long, short, new, *batches = sys.argv[1], *map(int, sys.argv[2:])
options = xllamacpp.CommonParams()
options.model.path, options.verbosity = file, 0
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
options.n_parallel, options.n_ctx = max(batches), 2048 * max(batches)
server = xllamacpp.Server(options)

def write(seed, prompt, new):
    ids = [100 + (seed + at) % 1000 for at in range(prompt)]
    fixed = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
    made = server.handle_completions({"prompt": ids, "n_predict": new, **fixed})["timings"]
    assert (made["prompt_n"], made["predicted_n"]) == (prompt, new), made

def rate(tokens, *runs):
    started = time.perf_counter()
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(lambda run: write(*run), runs))
    return tokens / (time.perf_counter() - started)

write(0, 16, 1)
found = {"prompt": rate(long, (0, long, 1))}
for rows in batches:
    found[f"{rows} texts"] = rate(rows * new, *((seed, short, new) for seed in range(rows)))
print(json.dumps(found))
"""


class Transformers:
    """`generate` of transformers, with the weights of a GGUF file in fp32."""

    def __init__(self, gguf: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        self._model = loaded.eval()
        self._model.generation_config.eos_token_id = None  # without an end token, no text ends early

    def new_tokens_per_s(self, rows: int) -> float:
        prompts = torch.randint(100, 1000, (rows, engine.PROMPT_TOKENS))
        started = time.perf_counter()
        made = self._model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        assert made.shape == (rows, engine.PROMPT_TOKENS + NEW_TOKENS)
        return rows * NEW_TOKENS / (time.perf_counter() - started)

    def prompt_tokens_per_s(self) -> float:
        prompt = torch.randint(100, 1000, (1, PROMPT_TOKENS))
        started = time.perf_counter()
        with torch.inference_mode():
            self._model(prompt, use_cache=True, logits_to_keep=1)
        return PROMPT_TOKENS / (time.perf_counter() - started)


def llama(python: Path, gguf: Path, threads: int) -> dict[str, float]:
    """Return the tokens per second of llama.cpp, by the names that the rows of the others have."""
    sizes = map(str, (threads, PROMPT_TOKENS, engine.PROMPT_TOKENS, NEW_TOKENS, *BATCHES))
    command = [str(python), "-c", _LLAMA, str(gguf), *sizes]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return found


def write_in_8_bits(gguf: Path, out: Path) -> None:
    """Write a GGUF file with the weights of `gguf` in Q8_0: blocks of 32 with a scale each."""
    from gguf import GGMLQuantizationType as Format
    from gguf import GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(gguf)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        kept = tensor.tensor_type in (Format.F32, Format.Q8_0)
        data = tensor.data if kept else quantize(dequantize(tensor.data, tensor.tensor_type), Format.Q8_0)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type if kept else Format.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_bytes_per_s(threads: int) -> float:
    """Return how fast `threads` threads read memory together: the best of ten passes over arrays that no cache holds."""
    arrays = [np.ones(READ_BYTES // 8) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def once() -> float:
            started = time.perf_counter()
            list(pool.map(np.max, arrays))
            return threads * READ_BYTES / (time.perf_counter() - started)

        return max(once() for _ in range(10))


def step_s(bundle: Path, threads: int, *, position: int = 0, longest: int = 1 << 30) -> float:
    """Return the median seconds of a step of one sequence."""
    session = open_steps(bundle, threads)
    return median_s(stepping(session, 1, position=position, longest=longest), 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, default=Path("bundles/smollm2"))
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    bundle, threads = arguments.bundle, arguments.threads
    peer = Transformers(arguments.gguf, threads)
    weights = sum(file.stat().st_size for file in bundle.glob("*.data"))
    rows: dict[str, Callable[[], float]] = {}
    for batch in BATCHES:
        rows[f"{batch} texts, attnserve"] = partial(engine.texts_tokens_per_s, bundle, batch, NEW_TOKENS, threads)
        rows[f"{batch} texts, transformers"] = partial(peer.new_tokens_per_s, batch)
    rows["prompt, attnserve"] = partial(engine.prefill_tokens_per_s, bundle, PROMPT_TOKENS, threads)
    rows["prompt, transformers"] = peer.prompt_tokens_per_s
    found: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        if arguments.llama is not None:
            files = {"llama.cpp": arguments.gguf, "llama.cpp in 8 bits": Path(folder) / "Q8_0.gguf"}
            write_in_8_bits(*files.values())
        for _ in range(arguments.rounds):
            for name, measure in rows.items():
                found[name].append(measure())
            for peer_name, file in files.items():
                for name, figure in llama(arguments.llama, file, threads).items():
                    found[f"{name}, {peer_name}"].append(figure)
            for width in sorted({1, threads}):
                found[f"steps, {width} threads"].append(1 / step_s(bundle, width, longest=SHORT))
            read = weights / step_s(bundle, threads, longest=SHORT)
            found["weights read a second / what memory gives"].append(read / read_bytes_per_s(threads))
            near, far = (step_s(bundle, threads, position=position) for position in FAR)
            found[f"a step at {FAR[1]:,} / at {FAR[0]:,}"].append(far / near)
    for name, figures in sorted(found.items()):
        print(f"{name:45} {statistics.median(figures):10,.2f}  ({min(figures):,.2f} to {max(figures):,.2f})")


if __name__ == "__main__":
    main()
