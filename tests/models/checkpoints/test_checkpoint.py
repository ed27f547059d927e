"""Folders: every form that is read, what is taken from each, and what is refused, with words that help."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.checkpoints.published import Checkpoint, CheckpointError, load_checkpoint
from models.encoder.heads import SentenceEncoder, SequenceClassifier
from models.folders.folder import WEIGHTS
from tests.models.checkpoints import tiny

ROUNDED = 1e-6  # float32: the same sums over two layers

INPUTS = tiny.batch((7, 3), pad_id=0, n_types=2)

# Types of modules.json, as sentence-transformers wrote them up to release 5.3 and writes them since.
OLD_TYPES = {kind: f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize")}
NEW_TYPES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """The folder of a small BertModel."""
    return tiny.save(tiny.build("BertModel", tiny.BERT), tmp_path / "bert")


def classifier(folder: Path, **settings) -> Path:
    return tiny.save(tiny.build("BertForSequenceClassification", {**tiny.BERT, **settings}), folder)


def write(file: Path, values: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(values), encoding="utf-8")


def change(file: Path, **changes) -> None:
    write(file, {**json.loads(file.read_text(encoding="utf-8")), **changes})


def change_tensors(folder: Path, drop: tuple[str, ...] = (), rename: dict[str, str] | None = None, **extra: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {(rename or {}).get(name, name): tensor.clone() for name, tensor in tensors.items() if name not in drop}
    save_file(tensors | extra, folder / "model.safetensors")


def write_modules(folder: Path, *kinds: str, types: dict[str, str] = OLD_TYPES, transformer: str = "") -> None:
    """modules.json with the modules in their customary folders: "", 1_Pooling, 2_Dense, ..."""
    paths = [transformer if kind == "Transformer" else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    modules = [{"idx": i, "name": str(i), "path": paths[i], "type": types[kind]} for i, kind in enumerate(kinds)]
    write(folder / "modules.json", modules)


def write_dense(place: Path, d_in: int, d_out: int, **settings) -> nn.Linear:
    torch.manual_seed(3)
    linear = nn.Linear(d_in, d_out)
    write(place / "config.json", {"in_features": d_in, "out_features": d_out, "bias": True, **settings})
    save_file({f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}, place / "model.safetensors")
    return linear


def outputs(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.no_grad():
        out = checkpoint.model(**INPUTS)
    return out.pooled if checkpoint.kind == "encoder" else out


# Plain folders


def test_a_plain_encoder_gets_mean_pooling(bert: Path) -> None:
    checkpoint = load_checkpoint(bert)
    assert isinstance(checkpoint.model, SentenceEncoder)
    assert not checkpoint.model.training
    assert (checkpoint.kind, checkpoint.architecture, checkpoint.pooling) == ("encoder", "BertModel", "mean")
    assert not checkpoint.normalized
    assert checkpoint.tokenizer_file == bert / "tokenizer.json"
    assert checkpoint.max_tokens == 50
    assert (checkpoint.prompts, checkpoint.default_prompt, checkpoint.id2label) == ({}, None, {})
    assert checkpoint.score_activation == "identity"


def test_shards_are_one_model(bert: Path, tmp_path: Path) -> None:
    reference = tiny.build("BertModel", tiny.BERT)
    sharded = tiny.save(reference, tmp_path / "sharded", max_shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert torch.equal(outputs(load_checkpoint(sharded)), outputs(load_checkpoint(bert)))


def test_weights_are_read_in_the_asked_dtype_whatever_they_are_stored_in(bert: Path) -> None:
    for dtype in (torch.float64, torch.float16):
        assert {p.dtype for p in load_checkpoint(bert, dtype=dtype).model.parameters()} == {dtype}
    tensors = {name: tensor.half() for name, tensor in load_file(bert / "model.safetensors").items()}
    save_file(tensors, bert / "model.safetensors")
    assert outputs(load_checkpoint(bert)).dtype == torch.float32


def test_names_with_a_prefix_and_from_tensorflow_are_understood(bert: Path) -> None:
    expected = outputs(load_checkpoint(bert))
    names = load_file(bert / "model.safetensors")
    old = {name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in names}
    change_tensors(bert, rename={name: f"bert.{new}" for name, new in old.items()})
    assert torch.equal(outputs(load_checkpoint(bert)), expected)


def test_known_leftovers_and_a_missing_pooler_are_tolerated(bert: Path) -> None:
    extra = {"embeddings.position_ids": torch.arange(50)[None], "cls.predictions.bias": torch.zeros(tiny.V)}
    change_tensors(bert, drop=("pooler.dense.weight", "pooler.dense.bias"), **extra)
    load_checkpoint(bert)


def test_nomic_in_the_spelling_of_its_authors(tmp_path: Path) -> None:
    """The same tensors beside config.json as the authors' code writes it."""
    folder = tiny.save(tiny.build("NomicBertModel", tiny.BERT), tmp_path)
    expected = outputs(load_checkpoint(folder))
    old = {
        "architectures": ["NomicBertModel"],
        "vocab_size": tiny.V,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "n_inner": 40,
        "n_positions": 50,
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": None,
        "type_vocab_size": 2,
    }
    write(folder / "config.json", old)
    assert torch.equal(outputs(load_checkpoint(folder)), expected)
    change(folder / "config.json", prenorm=True)
    with pytest.raises(CheckpointError, match="prenorm=True is not supported"):
        load_checkpoint(folder)


def test_modernbert_in_the_spelling_of_its_first_release(tmp_path: Path) -> None:
    """One number for the layers and one key for each rotary base."""
    settings = {**tiny.MODERNBERT, "local_attention": 4}
    folder = tiny.save(tiny.build("ModernBertModel", settings), tmp_path)
    expected = outputs(load_checkpoint(folder))
    values = json.loads((folder / "config.json").read_text())
    values = {key: value for key, value in values.items() if key not in ("layer_types", "rope_parameters")}
    write(folder / "config.json", {**values, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0})
    assert torch.equal(outputs(load_checkpoint(folder)), expected)


# sentence-transformers folders


@pytest.mark.parametrize("types", [OLD_TYPES, NEW_TYPES], ids=["old", "new"])
@pytest.mark.parametrize("transformer", ["", "0_Transformer"])
def test_a_pipeline_with_everything(bert: Path, tmp_path: Path, types: dict[str, str], transformer: str) -> None:
    """Pooling by [CLS], a dense layer to 5, and normalisation; the encoder at the top or in a folder of its own."""
    folder = tmp_path / "st"
    shutil.copytree(bert, folder / transformer)
    write_modules(folder, "Transformer", "Pooling", "Dense", "Normalize", types=types, transformer=transformer)
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 24, "pooling_mode_cls_token": True})
    dense = write_dense(folder / "2_Dense", 24, 5, activation_function="torch.nn.modules.activation.Tanh")
    write(folder / transformer / "sentence_bert_config.json", {"max_seq_length": 30, "do_lower_case": False})
    prompts = {"query": "query: ", "document": None}
    write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})

    checkpoint = load_checkpoint(folder)
    assert (checkpoint.pooling, checkpoint.normalized, checkpoint.max_tokens) == ("cls", True, 30)
    assert (checkpoint.prompts, checkpoint.default_prompt) == ({"query": "query: ", "document": ""}, "query")
    assert checkpoint.tokenizer_file == folder / transformer / "tokenizer.json"
    with torch.no_grad():
        cls = load_checkpoint(bert).model(**INPUTS).token_embeddings[:, 0]
        expected = torch.tanh(dense(cls))
    assert (outputs(checkpoint) - expected).abs().max() <= ROUNDED


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"word_embedding_dimension": 24}, "mean"),
        ({"pooling_mode": "cls", "embedding_dimension": 24}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_pooling_modes_old_and_new(bert: Path, settings: dict, pooling: str) -> None:
    write_modules(bert, "Transformer", "Pooling")
    write(bert / "1_Pooling" / "config.json", settings)
    assert load_checkpoint(bert).pooling == pooling


def test_a_pipeline_without_pooling_gives_token_vectors_only(bert: Path) -> None:
    write_modules(bert, "Transformer")
    checkpoint = load_checkpoint(bert)
    assert checkpoint.pooling == "none"
    assert checkpoint.model(**INPUTS).embedding is None


@pytest.mark.parametrize("model_class", ["BertForMaskedLM", "BertForPreTraining"])
def test_a_language_model_without_a_pooling_is_refused(model_class: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny.build(model_class, tiny.BERT), tmp_path)
    assert load_checkpoint(folder).pooling == "mean"
    (folder / "modules.json").unlink()
    refuse(folder, f"{model_class} predicts tokens, and nothing says what for.* --sparse.* save it with sentence-transformers")


def test_a_classifier_may_stand_in_modules_json_but_not_be_pooled(tmp_path: Path) -> None:
    """sentence-transformers would drop the classifier's head in silence."""
    folder = classifier(tmp_path, num_labels=1)
    write_modules(folder, "Transformer")
    assert load_checkpoint(folder).kind == "reranker"
    write_modules(folder, "Transformer", "Pooling")
    write(folder / "1_Pooling" / "config.json", {})
    refuse(folder, "modules.json has a Pooling module, but BertForSequenceClassification has a head that computes scores")


def test_folders_of_todays_sentence_transformers(bert: Path, tmp_path: Path) -> None:
    """Written by the library itself, both kinds; the vectors and the scores are its own."""
    import sentence_transformers as library
    from sentence_transformers.sentence_transformer import modules as parts

    _make_loadable(bert)
    body = parts.Transformer(str(bert))
    pooling = parts.Pooling(24, pooling_mode="max")
    dense = parts.Dense(24, 6, activation_function=nn.Identity())
    model = library.SentenceTransformer(modules=[body, pooling, dense, parts.Normalize()], device="cpu")
    model.save(str(tmp_path / "st"))
    checkpoint = load_checkpoint(tmp_path / "st")
    assert (checkpoint.pooling, checkpoint.normalized, checkpoint.max_tokens) == ("max", True, 50)
    with torch.no_grad():
        theirs = model({name: tensor.clone() for name, tensor in INPUTS.items()})["sentence_embedding"]
        assert (checkpoint.model(**INPUTS).embedding - theirs).abs().max() <= ROUNDED

    _make_loadable(classifier(tmp_path / "plain", num_labels=1))
    cross_encoder = library.CrossEncoder(str(tmp_path / "plain"), device="cpu", activation_fn=nn.Identity())
    cross_encoder.save_pretrained(str(tmp_path / "ce"))
    reranker = load_checkpoint(tmp_path / "ce")
    assert (reranker.kind, reranker.score_activation) == ("reranker", "identity")
    assert torch.equal(outputs(reranker), outputs(load_checkpoint(tmp_path / "plain")))


def _make_loadable(folder: Path) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "unk_token": "w0", "model_max_length": 50}
    write(folder / "tokenizer_config.json", settings)


# Limits, labels, activations


@pytest.mark.parametrize(
    ("max_seq_length", "model_max_length", "expected"),
    [
        (None, None, 50),
        (30, None, 30),
        (None, 40, 40),
        (None, int(1e30), 50),
        (45, 40, 45),  # the pipeline's word goes before the tokenizer's, as in sentence-transformers
        (400, 512, 50),
    ],
)
def test_max_tokens(bert: Path, max_seq_length: int | None, model_max_length: int | None, expected: int) -> None:
    write(bert / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    write(bert / "tokenizer_config.json", {"model_max_length": model_max_length})
    assert load_checkpoint(bert).max_tokens == expected


def test_roberta_loses_the_positions_up_to_its_padding_id(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(tiny.save(tiny.build("RobertaModel", tiny.BERT), tmp_path))
    assert (checkpoint.max_tokens, checkpoint.pad_token_id, checkpoint.uses_token_types) == (48, 1, False)


@pytest.mark.parametrize(
    ("settings", "kind", "activation"),
    [
        ({"num_labels": 1}, "reranker", "sigmoid"),
        ({"num_labels": 3}, "classifier", "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "classifier", "sigmoid"),
        ({"num_labels": 3, "problem_type": "regression"}, "classifier", "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "reranker", "identity"),
        ({"num_labels": 2, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "classifier", "sigmoid"),
    ],
)
def test_scores_become_what_cross_encoder_makes_of_them(tmp_path: Path, settings: dict, kind: str, activation: str) -> None:
    checkpoint = load_checkpoint(classifier(tmp_path, **settings))
    assert isinstance(checkpoint.model, SequenceClassifier)
    assert (checkpoint.kind, checkpoint.score_activation, checkpoint.pooling) == (kind, activation, None)
    assert checkpoint.uses_token_types


def test_an_unknown_activation_of_scores_is_refused(tmp_path: Path) -> None:
    folder = classifier(tmp_path, num_labels=1)
    change(folder / "config.json", sentence_transformers={"activation_fn": "os.system"})
    with pytest.raises(CheckpointError, match=r"activation_fn='os.system' is not supported"):
        load_checkpoint(folder)


def test_labels_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    labels = {i: f"name-{i}" for i in range(12)}
    folder = classifier(tmp_path / "named", id2label=labels, label2id={name: i for i, name in labels.items()})
    assert list(load_checkpoint(folder).id2label.items()) == list(labels.items())
    unnamed = classifier(tmp_path / "unnamed", num_labels=2)
    assert load_checkpoint(unnamed).id2label == {0: "LABEL_0", 1: "LABEL_1"}


# Another attention


@pytest.mark.parametrize("model_class", ["BertModel", "RobertaModel", "DistilBertModel"])
def test_linear_attention_keeps_the_weights(tmp_path: Path, model_class: str) -> None:
    settings = tiny.DISTILBERT if model_class == "DistilBertModel" else tiny.BERT
    folder = tiny.save(tiny.build(model_class, settings), tmp_path)
    trained, swapped = load_checkpoint(folder), load_checkpoint(folder, attention="linear")
    assert (trained.untrained, swapped.untrained) == (False, True)
    assert swapped.config.attention == "linear"
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(swapped.model.state_dict()[name], tensor)
    inputs = {name: tensor for name, tensor in INPUTS.items() if name != "token_type_ids"}
    assert (swapped.model(**inputs).pooled - trained.model(**inputs).pooled).abs().max() > 0.01


@pytest.mark.parametrize(
    ("model_class", "settings", "reason"),
    [
        ("MPNetModel", tiny.BERT, "a relative position bias"),
        ("ModernBertModel", tiny.MODERNBERT, "rotary positions or local windows"),
        ("NomicBertModel", tiny.BERT, "rotary positions"),
    ],
)
def test_linear_attention_is_refused_where_it_has_no_form(tmp_path: Path, model_class: str, settings: dict, reason: str) -> None:
    folder = tiny.save(tiny.build(model_class, settings), tmp_path)
    with pytest.raises(CheckpointError, match=f"attention='linear' does not support {reason}"):
        load_checkpoint(folder, attention="linear")


@pytest.mark.parametrize("attention", ["narrow", "wide", "magic"])
def test_attention_of_other_shapes_is_refused(bert: Path, attention: str) -> None:
    with pytest.raises(CheckpointError, match=f"attention='{attention}' cannot use the weights of the checkpoint"):
        load_checkpoint(bert, attention=attention)


# What is refused


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_missing_file_is_named(bert: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (bert / name).unlink()
        refuse(bert, f"{name} is missing")
    refuse(bert / "nowhere", "config.json is missing")


@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]])
def test_the_way_out_works(names: list[str], bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the message, run by the user, make a folder that loads: from tensors that a GPU had, shared and transposed ones too."""
    expected = outputs(load_checkpoint(bert))
    tensors = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in load_file(bert / WEIGHTS).items()}
    tensors["cls.predictions.decoder.weight"] = tensors["embeddings.word_embeddings.weight"]
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        for i, name in enumerate(names):
            torch.save(dict(list(tensors.items())[i :: len(names)]), bert / name)
    (bert / WEIGHTS).unlink()
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(bert)
    monkeypatch.chdir(bert)
    exec("\n".join(line.strip() for line in str(refusal.value).splitlines()[-3:]), {})
    assert torch.equal(outputs(load_checkpoint(bert)), expected)


def test_a_missing_shard_and_a_shard_elsewhere(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("BertModel", tiny.BERT), tmp_path, max_shard_size="8KB")
    index = folder / "model.safetensors.index.json"
    (folder / "model-00001-of-00004.safetensors").unlink(missing_ok=True)
    next(folder.glob("*.safetensors")).unlink(missing_ok=True)
    refuse(folder, "a shard named in model.safetensors.index.json, is missing")
    change(index, weight_map={"a": "../secret.safetensors"})
    refuse(folder, "which is not a plain file name")


def test_missing_unexpected_and_misshapen_tensors_are_named(bert: Path) -> None:
    whole = (bert / "model.safetensors").read_bytes()
    change_tensors(bert, drop=("encoder.layer.1.output.dense.weight",))
    refuse(bert, "encoder.layer.1.output.dense.weight is missing from the weights")
    (bert / "model.safetensors").write_bytes(whole)
    extra = {"encoder.layer.0.adapter.weight": torch.zeros(3), "encoder.layer.2.output.dense.bias": torch.zeros(24)}
    change_tensors(bert, **extra)
    refuse(bert, "encoder.layer.0.adapter.weight, encoder.layer.2.output.dense.bias are unexpected in the weights")
    (bert / "model.safetensors").write_bytes(whole)
    change(bert / "config.json", intermediate_size=41)
    refuse(bert, r"encoder.layer.0.intermediate.dense.weight has shape \(40, 24\), but config.json makes it \(41, 24\)")


def test_pipelines_that_are_not_supported(bert: Path) -> None:
    write_modules(bert, "Transformer", "LSTM", types={**OLD_TYPES, "LSTM": "sentence_transformers.models.LSTM"})
    refuse(bert, "module type 'sentence_transformers.models.LSTM' is not supported")
    write_modules(bert, "Transformer", "Pooling", types={**OLD_TYPES, "Pooling": "evil.Pooling"})
    refuse(bert, "module type 'evil.Pooling' is not supported")
    write_modules(bert, "Transformer", "Normalize", "Pooling")
    refuse(bert, "the order Transformer, Normalize, Pooling is not supported")
    write_modules(bert, "Transformer", transformer="../../etc")
    refuse(bert, "path='../../etc' leaves the folder")
    write(bert / "modules.json", {"0": "Transformer"})
    refuse(bert, "modules.json is not a list")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling_mode": "weightedmean"}, "pooling_mode='weightedmean' is not supported"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, r"2 pooling modes at once \(cls, max\)"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt=False is not supported"),
    ],
)
def test_poolings_that_are_not_supported(bert: Path, settings: dict, message: str) -> None:
    write_modules(bert, "Transformer", "Pooling")
    write(bert / "1_Pooling" / "config.json", settings)
    refuse(bert, message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_features": 23}, r"a Dense module takes in_features=23, but gets vectors of 24"),
        ({"activation_function": "os.system"}, "activation_function='os.system' is not supported"),
        ({"use_residual": True}, "use_residual=True is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name='token_embeddings' is not supported"),
        ({"bias": False}, "has the tensors .* instead of "),
    ],
)
def test_dense_layers_that_are_not_supported(bert: Path, settings: dict, message: str) -> None:
    write_modules(bert, "Transformer", "Pooling", "Dense")
    write(bert / "1_Pooling" / "config.json", {})
    write_dense(bert / "2_Dense", settings.get("in_features", 24), 5, **settings)
    refuse(bert, message)


def test_lower_casing_that_the_tokenizer_does_not_do_is_refused(bert: Path) -> None:
    write(bert / "sentence_bert_config.json", {"do_lower_case": True})
    refuse(bert, "sets do_lower_case, which tokenizer.json does not do")
    change(bert / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]})
    load_checkpoint(bert)
    change(bert / "tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": True})
    load_checkpoint(bert)


def test_a_default_prompt_without_a_text_is_refused(bert: Path) -> None:
    write(bert / "config_sentence_transformers.json", {"prompts": {"query": "q: "}, "default_prompt_name": "passage"})
    refuse(bert, "default_prompt_name='passage' is not one of the prompts")


def test_loading_runs_no_code_and_no_transformers() -> None:
    """The room imports torch, safetensors and the standard library. Training, which draws and counts, also imports numpy, and
    so do GGUF files, whose package returns arrays."""
    room = Path(__file__).parents[3] / "models"
    for file in room.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        words = ["import transformers", "from transformers", "import pickle", "import onnx"]
        counting = any(file.is_relative_to(room / folder) for folder in ("training", "checkpoints/gguf"))
        for word in words if counting else [*words, "import numpy"]:
            assert word not in source, f"{file}: {word}"
