"""Reads the modules of a sentence-transformers folder, which are the encoder and the steps after it.

`modules.json` lists the modules in order; `ORDERS` has the supported ones. A folder without that file is read as a single Transformer. Only
the last part of a module's type name is compared, since releases of sentence-transformers moved the classes between packages
("sentence_transformers.models.Pooling", "...modules.pooling.Pooling").
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from models.encoder.heads import Dense
from models.encoder.retrieval import SparseCode
from models.folders.folder import CheckpointError, JsonSettings, read_modules, read_settings, read_tensors, subfolder

MODULES = (
    *("Transformer", "MLMTransformer", "StaticEmbedding", "Pooling", "Dense", "Dropout", "Normalize"),
    *("SpladePooling", "SparseAutoEncoder", "MultiVectorMask", "Router", "SparseStaticEmbedding"),
)
TOKENS = "token_embeddings"
ORDERS = {  # regular expressions -> the same in words
    r"Transformer( Pooling( Dense| Dropout)*( Normalize)?)?": "Transformer and Pooling, then Dense layers, then Normalize",
    r"StaticEmbedding( Dense| Dropout)*( Normalize)?": "StaticEmbedding, then the same",
    r"(MLM)?Transformer SpladePooling": "Transformer and SpladePooling",
    r"Transformer Pooling( Normalize)? SparseAutoEncoder": "Transformer, Pooling and SparseAutoEncoder",
    r"Transformer( Dense)+( MultiVectorMask)?( Normalize)?( MultiVectorMask)?": "Transformer, Dense, MultiVectorMask, Normalize",
}

POOLING_NAMES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}

OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

DENSE_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}

TRANSFORMER_SETTINGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_xlm-roberta_config.json",
)

Filled = TypeVar("Filled", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The settings of a folder's modules. `pooling` is a name in POOLINGS. It is "none" if modules.json lists no Pooling module, and
    None if there is no modules.json.
    """

    transformer: Path  # folder of config.json, weights and tokenizer: that of the first module
    settings: JsonSettings  # settings of the Transformer module: max_seq_length, do_lower_case
    pooling: str | None
    dense: tuple[Dense, ...]
    normalized: bool
    static: bool = False  # the first module is StaticEmbedding and not Transformer
    splade: "SpladePooling | None" = None  # sparse vectors come from the head of a masked language model
    code: SparseCode | None = None  # sparse vectors come from the pooled one
    matrix: tuple[Dense, ...] = ()  # layers that make token matrices
    mask: JsonSettings | None = None  # settings of MultiVectorMask: the tokens that get no vector
    query_table: Path | None = None  # folder of a SparseStaticEmbedding, from which queries have their sparse vectors


@dataclass(frozen=True, kw_only=True)
class SpladePooling:
    """The settings of `models.encoder.retrieval.Splade`."""

    pooling: Literal["max", "sum"] = "max"
    logs: int = 1


def read_pipeline(folder: Path, *, sparse: bool = False) -> Pipeline:
    """Read the pipeline of a folder. `sparse`: a folder without modules.json has a masked language model whose head makes sparse vectors.

    Raises CheckpointError if the modules, their order or their settings are not supported.
    """
    modules = read_modules(folder)
    if not modules:
        how: dict[str, Any] = {"pooling": "none", "splade": SpladePooling()} if sparse else {"pooling": None}
        return Pipeline(transformer=folder, settings=_transformer_settings(folder), dense=(), normalized=False, **how)
    kinds = [_kind(module, folder) for module in modules]
    query_table: Path | None = None
    if kinds == ["Router"]:
        modules, query_table = _routes(folder, modules[0]["path"])
        kinds = [_kind(module, folder) for module in modules]
    places = [subfolder(folder, module["path"]) for module in modules]
    if not any(re.fullmatch(order, " ".join(kinds)) for order in ORDERS):
        raise CheckpointError(
            f"{folder / 'modules.json'}: the order {', '.join(kinds)} is not supported; supported: {'; '.join(ORDERS.values())}"
        )
    place = dict(zip(kinds, places, strict=True))
    of_tokens = "Dense" in kinds and "Pooling" not in kinds and kinds[0] == "Transformer"
    dense = tuple(_read_dense(each, of_tokens=of_tokens) for kind, each in zip(kinds, places, strict=True) if kind == "Dense")
    if sparse and "SpladePooling" not in kinds:
        raise CheckpointError(
            f"{folder / 'modules.json'} has no SpladePooling, so the checkpoint has no sparse vectors; leave out --sparse"
        )
    if kinds[0] == "StaticEmbedding":
        how = {"settings": JsonSettings({}, folder / "modules.json"), "pooling": "mean", "static": True}
    else:
        how = {"settings": _transformer_settings(places[0], masked="SpladePooling" in kinds)}
        how["pooling"] = _read_pooling(place["Pooling"]) if "Pooling" in kinds else "none"
    return Pipeline(
        transformer=places[0],
        dense=() if of_tokens else dense,
        matrix=dense if of_tokens else (),
        mask=read_settings(place["MultiVectorMask"] / "config.json") if "MultiVectorMask" in kinds else None,
        normalized="Normalize" in kinds and not of_tokens,
        query_table=query_table,
        code=_read_code(place["SparseAutoEncoder"]) if "SparseAutoEncoder" in kinds else None,
        splade=_read_splade(place["SpladePooling"]) if "SpladePooling" in kinds else None,
        **how,
    )


def _routes(folder: Path, path: str) -> tuple[list[dict[str, Any]], Path]:
    """Return the modules of a Router's documents, and the folder of the table of its queries. Raises CheckpointError for other routes."""
    place = subfolder(folder, path)
    files = [place / name for name in ("router_config.json", "config.json")]
    settings = read_settings(next((file for file in files if file.is_file()), files[0]))
    types, routes = settings.need("types"), settings.need("structure")
    modules = {
        role: [{"type": str(types.get(name)), "path": f"{path}/{name}".strip("/")} for name in routes.get(role, [])] for role in routes
    }
    if modules.keys() != {"query", "document"} or [_kind(module, folder) for module in modules["query"]] != ["SparseStaticEmbedding"]:
        raise CheckpointError(
            f"{settings.file}: the routes are {', '.join(modules)}; supported: query, of a SparseStaticEmbedding, and document; "
            "use another checkpoint"
        )
    return modules["document"], subfolder(folder, modules["query"][0]["path"])


def _kind(module: dict[str, Any], folder: Path) -> str:
    package, _, kind = module["type"].rpartition(".")
    if package.split(".")[0] not in ("sentence_transformers", "pylate") or kind not in MODULES:
        raise CheckpointError(
            f"{folder / 'modules.json'}: module type {module['type']!r} is not supported "
            f"(supported: {', '.join(MODULES)} of sentence_transformers); use another checkpoint"
        )
    return kind


def _transformer_settings(place: Path, *, masked: bool = False) -> JsonSettings:
    found = [place / name for name in TRANSFORMER_SETTINGS if (place / name).is_file()]
    settings = read_settings(found[0] if found else place / TRANSFORMER_SETTINGS[0], required=False)
    settings.allow("transformer_task", *(("fill-mask",) if masked else ("feature-extraction", "sequence-classification")))
    return settings


def _read_splade(place: Path) -> SpladePooling:
    settings = read_settings(place / "config.json")
    logs = {"relu": "1", "log1p_relu": "2"}
    pooling: Literal["max", "sum"] = settings.pick("pooling_strategy", "max", {"max": "max", "sum": "sum"})
    return SpladePooling(pooling=pooling, logs=int(settings.pick("activation_function", "relu", logs)))


def _read_pooling(place: Path) -> str:
    settings = read_settings(place / "config.json")
    settings.allow("include_prompt", True)
    old = [mode for key, mode in OLD_POOLING_KEYS.items() if settings.get(key, False)] or ["mean"]
    modes = settings.get("pooling_mode", old)
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1:
        raise CheckpointError(
            f"{settings.file}: {len(modes)} pooling modes at once ({', '.join(modes)}) are not supported; use a checkpoint with one"
        )
    return JsonSettings({"pooling_mode": modes[0]}, settings.file).pick("pooling_mode", "mean", POOLING_NAMES)


def _read_code(place: Path) -> SparseCode:
    settings = read_settings(place / "config.json")
    d_in, d_code, k = settings.need("input_dim"), settings.get("hidden_dim", 512), settings.get("k", 8)
    code = SparseCode(d_in, d_code, k=min(k, d_code), normalized=settings.get("normalize", False))
    tensors = read_tensors(place)
    tensors |= {"encoder.weight": tensors.get("decoder.linear.weight", tensors.get("encoder.weight", torch.empty(0)))}  # one of both names
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("stats_last_nonzero", "decoder.linear.weight")}
    return filled(code, tensors, place)


def _read_dense(place: Path, *, of_tokens: bool) -> Dense:
    settings = read_settings(place / "config.json")
    settings.allow("use_residual", False)
    settings.allow("module_input_name", TOKENS if of_tokens else "sentence_embedding")
    settings.allow("module_output_name", TOKENS if of_tokens else "sentence_embedding")
    d_in, d_out, bias = settings.need("in_features"), settings.need("out_features"), settings.get("bias", True)
    activation = settings.pick("activation_function", "torch.nn.modules.activation.Tanh", DENSE_ACTIVATIONS)
    return filled(Dense(d_in, d_out, activation=activation, bias=bias), read_tensors(place), place)


def filled(module: Filled, tensors: dict[str, Tensor], place: Path) -> Filled:
    """Return the module with these tensors. Raises CheckpointError, with their `place`, if they are not the module's."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if found != wanted:
        raise CheckpointError(f"{place} has the tensors {found} instead of {wanted}; copy it again")
    with torch.no_grad():
        module.load_state_dict(tensors)
    return module
