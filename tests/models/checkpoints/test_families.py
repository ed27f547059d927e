"""Every family gives the numbers of `transformers`, for every kind of head, from a folder that `transformers` has
written.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.modernbert import modeling_modernbert
from transformers.models.nomic_bert import modeling_nomic_bert

from models.attention.sparse.bigbird import random_blocks
from models.checkpoints.published import load_checkpoint
from tests.models.checkpoints import tiny

EXACT = 1e-10  # float64: the same formula, summed in another order
ROUNDED = 1e-5  # float32: 24 bits, a few layers, values of a few units

LENGTHS = (17, 9, 1, 16)

# id: (class of transformers, its settings)
CASES = {
    "bert": ("BertModel", tiny.BERT),
    "bert-relu-3-types-eps": ("BertModel", {**tiny.BERT, "hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
    "bert-gelu_new-1-type": ("BertModel", {**tiny.BERT, "hidden_act": "gelu_new", "type_vocab_size": 1}),
    "bert-mlm": ("BertForMaskedLM", tiny.BERT),
    "bert-pretraining": ("BertForPreTraining", tiny.BERT),
    "bert-classifier": ("BertForSequenceClassification", {**tiny.BERT, "num_labels": 3}),
    "bert-reranker": ("BertForSequenceClassification", {**tiny.BERT, "num_labels": 1}),
    "bert-tokens": ("BertForTokenClassification", {**tiny.BERT, "num_labels": 5}),
    "roberta": ("RobertaModel", {**tiny.BERT, "type_vocab_size": 1}),
    "roberta-pad-4": ("RobertaModel", {**tiny.BERT, "pad_token_id": 4, "hidden_act": "gelu_pytorch_tanh"}),
    "roberta-mlm": ("RobertaForMaskedLM", tiny.BERT),
    "roberta-classifier": ("RobertaForSequenceClassification", {**tiny.BERT, "num_labels": 2}),
    "roberta-tokens": ("RobertaForTokenClassification", {**tiny.BERT, "num_labels": 4}),
    "xlm-roberta": ("XLMRobertaModel", {**tiny.BERT, "type_vocab_size": 1}),
    "xlm-roberta-reranker": ("XLMRobertaForSequenceClassification", {**tiny.BERT, "num_labels": 1}),
    "xlm-roberta-tokens": ("XLMRobertaForTokenClassification", {**tiny.BERT, "num_labels": 4}),
    "distilbert": ("DistilBertModel", tiny.DISTILBERT),
    "distilbert-sinusoidal-relu": ("DistilBertModel", {**tiny.DISTILBERT, "sinusoidal_pos_embds": True, "activation": "relu"}),
    "distilbert-mlm": ("DistilBertForMaskedLM", tiny.DISTILBERT),
    "distilbert-classifier": ("DistilBertForSequenceClassification", {**tiny.DISTILBERT, "num_labels": 3}),
    "distilbert-tokens": ("DistilBertForTokenClassification", {**tiny.DISTILBERT, "num_labels": 3}),
    "mpnet": ("MPNetModel", tiny.BERT),
    "mpnet-mlm": ("MPNetForMaskedLM", tiny.BERT),
    "mpnet-pad-7": ("MPNetModel", {**tiny.BERT, "pad_token_id": 7, "hidden_act": "relu"}),
    "mpnet-classifier": ("MPNetForSequenceClassification", {**tiny.BERT, "num_labels": 3}),
    "mpnet-tokens": ("MPNetForTokenClassification", {**tiny.BERT, "num_labels": 3}),
    "albert": ("AlbertModel", tiny.ALBERT),
    "albert-embeddings-as-wide-gelu": ("AlbertModel", {**tiny.ALBERT, "embedding_size": 24, "hidden_act": "gelu"}),
    "albert-mlm": ("AlbertForMaskedLM", tiny.ALBERT),
    "albert-pretraining": ("AlbertForPreTraining", tiny.ALBERT),
    "albert-classifier": ("AlbertForSequenceClassification", {**tiny.ALBERT, "num_labels": 3}),
    "albert-reranker": ("AlbertForSequenceClassification", {**tiny.ALBERT, "num_labels": 1}),
    "albert-tokens": ("AlbertForTokenClassification", {**tiny.ALBERT, "num_labels": 3}),
    "electra": ("ElectraModel", {**tiny.BERT, "embedding_size": 10}),
    "electra-embeddings-as-wide": ("ElectraModel", {**tiny.BERT, "embedding_size": 24}),
    "electra-discriminator": ("ElectraForPreTraining", {**tiny.BERT, "embedding_size": 10}),
    "electra-generator": ("ElectraForMaskedLM", {**tiny.BERT, "embedding_size": 10}),
    "electra-classifier": ("ElectraForSequenceClassification", {**tiny.BERT, "embedding_size": 10, "num_labels": 3}),
    "electra-reranker": ("ElectraForSequenceClassification", {**tiny.BERT, "embedding_size": 10, "num_labels": 1}),
    "electra-tokens": ("ElectraForTokenClassification", {**tiny.BERT, "embedding_size": 10, "num_labels": 3}),
    "deberta-v3": ("DebertaV2Model", tiny.DEBERTA),
    "deberta-v3-far": ("DebertaV2Model", {**tiny.DEBERTA, "position_buckets": 4, "max_relative_positions": 9}),
    "deberta-without-buckets": ("DebertaV2Model", {**tiny.DEBERTA, "position_buckets": -1, "max_relative_positions": 5}),
    "deberta-c2p-positions-types": (
        "DebertaV2Model",
        {**tiny.DEBERTA, "pos_att_type": "c2p", "position_biased_input": True, "type_vocab_size": 2, "hidden_act": "gelu_new"},
    ),
    "deberta-p2c": ("DebertaV2Model", {**tiny.DEBERTA, "pos_att_type": ["p2c"]}),
    "deberta-mlm": ("DebertaV2ForMaskedLM", {**tiny.DEBERTA, "tie_word_embeddings": False}),
    "deberta-classifier": ("DebertaV2ForSequenceClassification", {**tiny.DEBERTA, "num_labels": 3}),
    "deberta-reranker-tanh": ("DebertaV2ForSequenceClassification", {**tiny.DEBERTA, "num_labels": 1, "pooler_hidden_act": "tanh"}),
    "deberta-tokens": ("DebertaV2ForTokenClassification", {**tiny.DEBERTA, "num_labels": 3}),
    "modernbert": ("ModernBertModel", {**tiny.MODERNBERT, "local_attention": 8}),
    "modernbert-every-2-biases": (
        "ModernBertModel",
        {
            **tiny.MODERNBERT,
            "local_attention": 5,
            "global_attn_every_n_layers": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "norm_eps": 1e-3,
            "hidden_activation": "silu",
        },
    ),
    "modernbert-all-local": ("ModernBertModel", {**tiny.MODERNBERT, "layer_types": ["sliding_attention"] * 4, "local_attention": 2}),
    "modernbert-mlm": ("ModernBertForMaskedLM", {**tiny.MODERNBERT, "local_attention": 8}),
    "modernbert-classifier-cls": ("ModernBertForSequenceClassification", {**tiny.MODERNBERT, "num_labels": 3}),
    "modernbert-classifier-mean": (
        "ModernBertForSequenceClassification",
        {
            **tiny.MODERNBERT,
            "num_labels": 1,
            "classifier_pooling": "mean",
            "classifier_bias": True,
            "classifier_activation": "relu",
            "norm_bias": True,
        },
    ),
    "modernbert-tokens": ("ModernBertForTokenClassification", {**tiny.MODERNBERT, "num_labels": 3, "local_attention": 4}),
    "nomic": ("NomicBertModel", tiny.BERT),
    "nomic-head-12-base": (
        "NomicBertModel",
        {**tiny.BERT, "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "hidden_act": "gelu"},
    ),
    "nomic-mlm": ("NomicBertForMaskedLM", tiny.BERT),
    "nomic-classifier": ("NomicBertForSequenceClassification", {**tiny.BERT, "num_labels": 3}),
    "nomic-tokens": ("NomicBertForTokenClassification", {**tiny.BERT, "num_labels": 3}),
    "longformer": ("LongformerModel", {**tiny.BERT, "attention_window": 6, "pad_token_id": 1}),
    "longformer-mlm": ("LongformerForMaskedLM", {**tiny.BERT, "attention_window": [4, 4], "pad_token_id": 3}),
    "longformer-classifier": ("LongformerForSequenceClassification", {**tiny.BERT, "attention_window": [6, 6], "num_labels": 3}),
    "longformer-tokens": ("LongformerForTokenClassification", {**tiny.BERT, "attention_window": [8, 8], "num_labels": 3}),
    "bigbird": ("BigBirdModel", {**tiny.BERT, "block_size": 4}),  # 17 tokens: below 5 + 2 r blocks, beyond which `transformers` is wrong
    "bigbird-full": ("BigBirdModel", {**tiny.BERT, "attention_type": "original_full"}),
    "bigbird-pretraining": ("BigBirdForPreTraining", {**tiny.BERT, "block_size": 2, "num_random_blocks": 2}),
    "bigbird-classifier": ("BigBirdForSequenceClassification", {**tiny.BERT, "block_size": 2, "num_labels": 3, "hidden_act": "relu"}),
    "bigbird-tokens": ("BigBirdForTokenClassification", {**tiny.BERT, "block_size": 2, "num_labels": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every token that is not padding, on right-padded texts of mixed lengths."""
    model_class, settings = CASES[case]
    reference = tiny.build(model_class, settings)
    tiny.save(reference, tmp_path)
    compare(model_class, reference, tmp_path, torch.float32, ROUNDED)
    _make_exact(reference, monkeypatch)
    compare(model_class, reference, tmp_path, torch.float64, EXACT)


def compare(model_class: str, reference: nn.Module, folder: Path, dtype: torch.dtype, tolerance: float) -> None:
    checkpoint = load_checkpoint(folder, dtype=dtype)
    assert checkpoint.architecture == model_class
    inputs = tiny.batch(LENGTHS, pad_id=checkpoint.pad_token_id, n_types=checkpoint.config.n_token_types)
    if not checkpoint.uses_token_types:
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        ours = checkpoint.model(**inputs)
        theirs = _run(reference.to(dtype), inputs, checkpoint.kind)
    ours = ours.token_embeddings if checkpoint.kind == "encoder" else ours
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    if ours.dim() == 3:  # one row a token
        ours, theirs = ours[inputs["attention_mask"] == 1], theirs[inputs["attention_mask"] == 1]
    assert theirs.std() > 0.1, "a reference that says nothing proves nothing"
    assert (ours - theirs).abs().max() <= tolerance


def _run(reference: nn.Module, inputs: dict[str, Tensor], kind: str) -> Tensor:
    if kind != "encoder":
        return reference(**inputs).logits
    return reference.base_model(**inputs).last_hidden_state


def _make_exact(reference: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` turns q and k, and takes Longformer's softmax and the root of DeBERTa's widths, in float32 whatever the model's dtype
    is: the same in float64.
    """
    monkeypatch.setattr(modeling_deberta_v2, "scaled_size_sqrt", lambda q, factor: torch.tensor(q.shape[-1] * factor).double().sqrt())
    if reference.config.model_type == "longformer":
        monkeypatch.setattr(nn.functional, "softmax", lambda scores, dim, dtype: scores.softmax(dim))
    rotary = getattr(reference.base_model, "rotary_emb", None)
    if rotary is not None:
        reference.base_model.rotary_emb = ExactRotary(rotary.config)
        monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", modeling_nomic_bert.apply_rotary_pos_emb)


class ExactRotary(nn.Module):
    """The rotary module of `transformers`, in float64."""

    def __init__(self, config) -> None:
        super().__init__()
        self.parameters_of = config.rope_parameters
        self.d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        base = (self.parameters_of if layer_type is None else self.parameters_of[layer_type])["rope_theta"]
        inv_freq = base ** (-torch.arange(0, self.d_head, 2, dtype=torch.float64) / self.d_head)
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


@torch.no_grad()
def test_a_long_bigbird_is_its_dense_definition(tmp_path: Path) -> None:
    """Full attention of `transformers` under a mask a head: ends, neighbours and the loaded layer's random blocks of a row's length.

    25 and 18 blocks, where 7 would see everything. One layer, since the mask is one for all of them.
    """
    settings = {**tiny.BERT, "num_hidden_layers": 1, "block_size": 2, "num_random_blocks": 1}
    reference = tiny.build("BigBirdModel", settings)
    checkpoint = load_checkpoint(tiny.save(reference, tmp_path), dtype=torch.float64)
    reference.set_attention_type("original_full")
    inputs = tiny.batch((49, 36), pad_id=checkpoint.pad_token_id, n_types=checkpoint.config.n_token_types)
    tokens = inputs["attention_mask"] == 1
    draws = checkpoint.model.encoder.blocks[0].attention.draws  # (H, blocks, r)
    seen = torch.zeros(2, len(draws), 50, 50, dtype=torch.bool)
    for b, n in enumerate((25, 18)):
        drawn = random_blocks(draws[:, :n], torch.tensor([[[n]]]))[0]  # (H, n, r)
        blocks = ((torch.arange(n)[:, None] - torch.arange(n)).abs() <= 1).repeat(len(draws), 1, 1)
        blocks[:, [0, n - 1]] = blocks[:, :, [0, n - 1]] = True
        blocks[:, 1 : n - 1].scatter_(2, drawn[:, 1 : n - 1], True)
        seen[b, :, : 2 * n, : 2 * n] = blocks.repeat_interleave(2, 1).repeat_interleave(2, 2)
    mask = torch.where(seen[..., :49, :49] & tokens[:, None, None], 0.0, -1e9).double()  # e^-10⁹ is 0
    ours = checkpoint.model(**inputs).token_embeddings
    theirs = reference.double()(**(inputs | {"attention_mask": mask})).last_hidden_state
    assert theirs[tokens].std() > 0.1
    assert (ours[tokens] - theirs[tokens]).abs().max() <= EXACT
