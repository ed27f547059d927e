"""Opens graphs in ONNX Runtime, and runs them on batches of token ids."""

import logging
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.errors import AttnserveError

if TYPE_CHECKING:
    import onnxruntime as ort

log = logging.getLogger("attnserve")

Array = NDArray[np.float32]
Ids = Sequence[list[int]]
Opened = TypeVar("Opened")

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
DEVICES = {CPU: "cpu", CUDA: "cuda"}  # provider -> ONNX Runtime's name of its device

UNATTENDED = 2  # in ATTENTION_MASK: a token that is computed, and that no token attends to
_USUAL_TOKENS = 1024  # largest number of tokens of a usual run, padding included; only a run of one long text has more

_CUDA_FAILURE = re.compile(r"CUDA failure (\d+)")
# Values of cudaError_t (memory, hardware and launch errors) after which CUDA's documentation requires that the process be terminated.
_STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 999})


class SettingsConflict(AttnserveError, ValueError):
    """The machine does not support what the settings require. The message names the setting to change."""


class Session(Protocol):
    """An encoder's graph, opened in a runtime. Several threads call `run` at once."""

    provider: str

    def run(
        self, outputs: Sequence[str], ids: Ids, type_ids: Ids | None, unattended: Sequence[int] = (), *, alone: bool = True
    ) -> dict[str, Array]:
        """Compute the named outputs of B inputs of up to N tokens each. Returns, for each output, B rows in the order of the inputs. Blocks
        until done. No token attends to the last tokens of each input, as many as `unattended` says (default: none).

        `alone` means that no other run is in progress or queued, so that this run may use all cores.
        """
        ...

    def begin(self, ids: list[int], *, within_s: float) -> None:
        """Run one input, and stop the run after `within_s` seconds. Raises the runtime's error if the run fails before that time."""
        ...


def open_graph(
    graph: Path | bytes,
    *,
    threads: int,
    provider: str = CPU,
    gpu_memory_gib: float | None = None,
    promised: contract.Graph | None = None,
    whole: bool = False,
) -> "ort.InferenceSession":
    """Return a session of a graph, given as a file or as bytes. Its threads spin during a call, but not after it, so that HTTP can use the
    cores.

    `whole` means that the provider must compute every node of the graph. On CUDA, the session then records CUDA graphs.

    Raises BundleError if the file is no graph, or if its tensors differ from `promised`, the graph's entry in the manifest. Raises
    SettingsConflict if `provider` is not available, or not for the whole graph. (If a CUDA driver, device or library is missing, ONNX
    Runtime itself would use the CPU without an error.)
    """
    import onnxruntime as ort

    options = _options(threads)
    if provider == CPU:
        _share_memory(options)
    asked = [(provider, cuda_options(gpu_memory_gib, cuda_graphs=whole) if provider == CUDA else {})]
    if whole:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")  # what `elsewhere` reads
    if provider == CUDA:
        ort.preload_dlls()  # loads the libraries of onnxruntime-gpu[cuda,cudnn], because the dynamic loader does not find them
    try:
        session = ort.InferenceSession(graph, options, providers=asked, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's errors have no other common base class
        if provider == CPU and isinstance(graph, Path):
            raise contract.BundleError(f"{graph} cannot be opened by ONNX Runtime: {in_a_line(error)}. Export the bundle again.") from error
        if provider == CPU or not isinstance(error, RuntimeError):
            raise
        raise _no_provider(graph, provider, str(error)) from error
    if promised is not None:
        _check_interface(session, promised, str(graph))
    if provider not in (got := session.get_providers()):
        raise _no_provider(graph, provider, f"the session has only {', '.join(got)}")
    if whole and (others := elsewhere(session, provider)):
        raise _no_provider(graph, provider, f"it has no kernel for {', '.join(sorted(others))}")
    return session


def elsewhere(session: "ort.InferenceSession", provider: str) -> Counter[str]:
    """Return the number of nodes of each operator that `provider` does not compute."""
    parts = session.get_provider_graph_assignment_info()
    return Counter(node.op_type for part in parts if part.ep_name != provider for node in part.get_nodes())


def open_twice(graph: Path, *, threads: int, promised: contract.Graph) -> tuple["ort.InferenceSession", "ort.InferenceSession"]:
    """Return two sessions of a graph on the CPU, with one thread and with `threads`, which have their weights in the same memory.

    A session packs its weights: it copies them in the order in which it reads them. ONNX Runtime's Python interface cannot share a copy,
    but it can write one into a file, which each session of that file maps into memory. The file is written at each start, because the
    order depends on the CPU and on the release, and deleted once it is mapped. Without a disk for it, each session has a copy.
    """
    if threads == 1:
        only = open_graph(graph, threads=1, promised=promised)
        return only, only
    try:
        with tempfile.TemporaryDirectory(prefix="attnserve-") as folder:
            packed = _with_packed_weights(graph, Path(folder))
            return open_graph(packed, threads=1, promised=promised), open_graph(packed, threads=threads, promised=promised)
    except Exception as error:  # errors of the graph itself are raised below, with its own name
        log.info("each session packs the weights", extra={"graph": str(graph), "why": in_a_line(error)})
    return open_graph(graph, threads=1, promised=promised), open_graph(graph, threads=threads, promised=promised)


def _with_packed_weights(graph: Path, folder: Path) -> Path:
    """Write the graph and its packed weights into `folder`, and return the file to open. Raises OSError if `folder` is not on a disk with
    room for them.
    """
    import onnxruntime as ort

    if _in_memory(folder):
        raise OSError(f"{folder} is in memory: set TMPDIR to a folder on a disk")
    needed, free = 4 * sum(file.stat().st_size for file in graph.parent.iterdir()), shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{folder} has {free:,} bytes of free space, and {needed:,} may be needed: set TMPDIR to another folder")
    written, weights = folder / "packed.onnx", folder / "packed.onnx.data"
    options = _options(threads=1)
    options.optimized_model_filepath = str(written)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights.name)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    ort.InferenceSession(graph, options, providers=[CPU])
    # ONNX Runtime writes a tensor as a whole, and Linux maps what was written as a whole when a part of it is read, so that one row of a
    # vocabulary would take all of it. A copy is written in small parts.
    shutil.copyfile(weights, copied := folder / "copy")
    copied.replace(weights)
    return written


def _in_memory(folder: Path) -> bool:
    """Return whether the folder's files are kept in memory, by proc_pid_mountinfo(5)."""
    device = folder.stat().st_dev
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(mount.split()[2] == f"{os.major(device)}:{os.minor(device)}" and " - tmpfs " in mount for mount in mounts)


def _options(threads: int) -> "ort.SessionOptions":
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options


def _share_memory(options: "ort.SessionOptions") -> None:
    """Let a CPU session take the memory of its runs from the one arena of this process.

    An arena keeps the memory of its largest run, so a process with an arena for each of its sessions would keep that many times as much.
    Weights that the runtime has packed are kept outside the arena, which grows to powers of two.
    """
    _make_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


@cache
def _make_arena() -> None:
    import onnxruntime as ort

    arena = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(arena, ort.OrtArenaCfg({"arena_extend_strategy": 0}))  # 0: to powers of two


def in_a_line(error: BaseException) -> str:
    """Return the message of a library's error as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_interface(session: "ort.InferenceSession", promised: contract.Graph, graph: str) -> None:
    """Raise BundleError for the first tensor that differs from the manifest. A dynamic axis of the graph may have any size."""
    for way, found, wanted in (("input", session.get_inputs(), promised.inputs), ("output", session.get_outputs(), promised.outputs)):
        if (names := [node.name for node in found]) != (told := [tensor.name for tensor in wanted]):
            raise contract.BundleError(
                f"{graph}: the {way}s are {names!s:.300}, but the manifest has {told!s:.300}. Export the bundle again."
            )
        for node, tensor in zip(found, wanted, strict=True):
            same = len(node.shape) == len(tensor.shape) and all(
                size == axis or not isinstance(size, int) for size, axis in zip(node.shape, tensor.shape, strict=True)
            )
            if not same or _TYPES.get(node.type) != tensor.dtype:
                raise contract.BundleError(
                    f"{graph}: the {way} {node.name} is {node.type} {tuple(node.shape)}, but the manifest has {tensor.dtype} "
                    f"{tensor.shape}. Export the bundle again."
                )


_TYPES = {"tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(float)": "float32"}


def cuda_options(memory_gib: float | None, *, cuda_graphs: bool = False) -> dict[str, str]:
    """Return the options of the CUDA provider. `memory_gib` limits one session's weights and activations; None means no limit.
    `cuda_graphs` records the kernels of a run, to launch them all at once in later runs.
    """
    options = {
        # With the default, the arena doubles each time it grows, and so reserves unused memory that other processes may need.
        "arena_extend_strategy": "kSameAsRequested",
        # TF32 is off, because the golden vectors of an fp32 bundle are checked to fp32's precision. Export in fp16 to use tensor cores.
        "use_tf32": "0",
    }
    if cuda_graphs:
        options["enable_cuda_graph"] = "1"
    if memory_gib is not None:
        options["gpu_mem_limit"] = str(int(memory_gib * 2**30))
    return options


def _no_provider(graph: Path | bytes, provider: str, why: str) -> SettingsConflict:
    where = graph if isinstance(graph, Path) else "copies of states"
    return SettingsConflict(
        f"{where}: {provider} was asked for and cannot be had: {why}. See that nvidia-smi shows a device here and that the libraries of "
        "CUDA and cuDNN are found (README, On a GPU), or set provider=cpu."
    )


class _OpenGraph(NamedTuple):
    """A graph, opened with one thread and with all threads. On a GPU both are the same session."""

    one_thread: "ort.InferenceSession"
    all_threads: "ort.InferenceSession"


class OnnxSession:
    """A bundle's graph in ONNX Runtime, opened twice (one thread, all threads) over the same weights.

    Under load each run has one thread and one core, so no thread waits for another thread after an operator. A run that is alone uses
    `threads` threads. These threads spin between operators, since no other run needs the cores, and stop spinning when the run ends.

    If the bundle has a graph for short texts, a run has only such texts or none (see `BatchingQueue`).
    """

    def __init__(
        self, bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str = "auto", gpu_memory_gib: float | None = None
    ) -> None:
        """Without a GPU, `provider` "cuda" raises SettingsConflict, and "auto" uses the CPU. `self.provider` is the provider in use."""
        short = manifest.short_graph

        def opened(chosen: str) -> tuple[str, _OpenGraph, _OpenGraph | None]:
            memory = gpu_memory_gib if gpu_memory_gib is None or short is None else gpu_memory_gib / 2  # a session for each graph

            def both(graph: contract.Graph) -> _OpenGraph:
                file = bundle / graph.file
                if chosen == CPU:
                    return _OpenGraph(*open_twice(file, threads=threads, promised=graph))
                only = open_graph(file, threads=threads, provider=chosen, gpu_memory_gib=memory, promised=graph)
                return _OpenGraph(only, only)

            return chosen, both(manifest.graph), None if short is None else both(short.graph)

        self.provider, self._graph, self._short = with_provider(provider, manifest.name, opened)
        self._short_tokens = 0 if short is None else short.max_tokens
        self._shrinking = shrinking() if self.provider == CPU else None
        self._typed = any(tensor.name == contract.TOKEN_TYPE_IDS for tensor in manifest.graph.inputs)
        self._pad = manifest.pad_token_id
        if self.provider == CPU:
            _on_cpu.add(self)

    def run(
        self, outputs: Sequence[str], ids: Ids, type_ids: Ids | None, unattended: Sequence[int] = (), *, alone: bool = True
    ) -> dict[str, Array]:
        graph = self._graph_of(max(ids, key=len))
        assert graph is self._graph_of(min(ids, key=len)), "a batch has only short texts or none"
        session = graph.all_threads if alone else graph.one_thread
        feed = self._feed(ids, type_ids, unattended)
        options = self._shrinking if feed[contract.INPUT_IDS].size > _USUAL_TOKENS else None
        return dict(zip(outputs, session.run(outputs, feed, options), strict=True))

    def _graph_of(self, ids: list[int]) -> _OpenGraph:
        return self._graph if self._short is None or len(ids) > self._short_tokens else self._short

    def shrink(self) -> None:
        """Make the arena free the memory that it keeps for later runs of any session. ONNX Runtime does so only at the end of a run, so one
        token is run.
        """
        self._graph_of([self._pad]).one_thread.run(None, self._feed([[self._pad]], None), self._shrinking)

    def begin(self, ids: list[int], *, within_s: float) -> None:
        import onnxruntime as ort

        options = shrinking() if self.provider == CPU else ort.RunOptions()  # `shrinking` frees memory after a long input
        end = threading.Timer(within_s, setattr, (options, "terminate", True))
        end.start()
        try:
            self._graph_of(ids).one_thread.run(None, self._feed([ids], None), options)
        except Exception:
            if not options.terminate:
                raise
        finally:
            end.cancel()

    def _feed(self, ids: Ids, type_ids: Ids | None, unattended: Sequence[int] = ()) -> dict[str, NDArray[np.int64]]:
        input_ids, mask, types = pad(ids, type_ids, self._pad)
        for row, count in enumerate(unattended):
            if count:
                mask[row, len(ids[row]) - count : len(ids[row])] = UNATTENDED
        feed = {contract.INPUT_IDS: input_ids, contract.ATTENTION_MASK: mask}
        if self._typed:
            feed[contract.TOKEN_TYPE_IDS] = types if types is not None else np.zeros_like(input_ids)
        return feed


_on_cpu: "weakref.WeakSet[OnnxSession]" = weakref.WeakSet()


def shrink_arena() -> None:
    """Free the memory that this process's arena keeps for later runs, if there is an encoder on the CPU."""
    if session := next(iter(_on_cpu), None):
        session.shrink()


def pad(
    ids: Sequence[list[int]], type_ids: Sequence[list[int]] | None, pad_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
    """Return ids, attention mask and type ids, (B, N), padded on the right. N is the length of the longest input."""
    longest = max(map(len, ids))
    if all(len(row) == longest for row in ids):
        input_ids = np.array(ids, np.int64)
        return input_ids, np.ones_like(input_ids), None if type_ids is None else np.array(type_ids, np.int64)
    input_ids = np.full((len(ids), longest), pad_id, np.int64)
    mask = np.zeros_like(input_ids)
    types = None if type_ids is None else np.zeros_like(input_ids)
    for row, tokens in enumerate(ids):
        input_ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        if types is not None and type_ids is not None:
            types[row, : len(tokens)] = type_ids[row]
    return input_ids, mask, types


def shrinking() -> "ort.RunOptions":
    """Return options of a run. With them, when the run ends, the arena frees the memory by which it grew, e.g. 750 MB after a text of 8,192
    tokens.
    """
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def with_provider(wanted: str, model: str, opened: Callable[[str], Opened]) -> Opened:
    """Return `opened(provider)` for the provider that the setting `wanted` selects. If "auto" selects the GPU and opening raises
    SettingsConflict, log a warning and use the CPU."""
    import onnxruntime as ort

    one_runtime()
    chosen = choose_provider(wanted, ort.get_available_providers())
    try:
        return opened(chosen)
    except SettingsConflict as conflict:
        if wanted != "auto" or chosen == CPU:
            raise
        log.warning("computes on the CPU, since provider=auto found no GPU that works", extra={"model": model, "why": str(conflict)})
        return opened(CPU)


def choose_provider(wanted: str, available: Sequence[str]) -> str:
    if wanted == "cuda" and CUDA not in available:
        raise SettingsConflict(
            f"provider=cuda, but this onnxruntime offers only {', '.join(available)}: install onnxruntime-gpu in its place"
        )
    return CUDA if wanted == "cuda" or (wanted == "auto" and CUDA in available) else CPU


def check_install(wanted: str) -> None:
    """Raise SettingsConflict if the setting `provider` cannot be used. Some problems are found only later, when a graph is opened."""
    one_runtime()
    if wanted == "cuda":  # otherwise onnxruntime, which is slow to import, is not needed here
        import onnxruntime as ort

        choose_provider(wanted, ort.get_available_providers())


def stays_on_the_cpu(model: str, wanted: str) -> None:
    """Log that a model without GPU support runs on the CPU although a GPU is available."""
    import onnxruntime as ort

    if wanted != "cpu" and CUDA in ort.get_available_providers():
        log.info("computes on the CPU, as every encoder-decoder does", extra={"model": model, "provider": wanted})


def device_lost(error: BaseException) -> bool:
    """Return whether this process can no longer use its device. After some CUDA errors every later call fails with the same error.

    ONNX Runtime reports these errors as `CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; ..`. Running out of memory is
    no such error.
    """
    found = _CUDA_FAILURE.search(str(error))
    return found is not None and int(found[1]) in _STICKY


def one_runtime() -> None:
    """Raise SettingsConflict if onnxruntime and onnxruntime-gpu are both installed, since both install the same module."""
    if _installed("onnxruntime") and _installed("onnxruntime-gpu"):
        raise SettingsConflict(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other. Keep one: "
            "`pip uninstall -y onnxruntime onnxruntime-gpu`, then `pip install onnxruntime` (CPU) or `pip install onnxruntime-gpu`."
        )


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
