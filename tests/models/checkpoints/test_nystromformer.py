"""A Nyströmformer's folder gives the numbers of `transformers` where that computes the paper's attention, and the paper's elsewhere."""

from pathlib import Path

import pytest
import torch

from models.checkpoints.published import load_checkpoint
from tests.models.checkpoints import tiny

EXACT = 1e-9  # float64; six rounds of the inverse multiply what is rounded
N = 16
SETTINGS = {**tiny.BERT, "num_landmarks": 4, "segment_means_seq_len": N, "conv_kernel_size": 5, "pad_token_id": 1}

CASES = {
    "model": ("NystromformerModel", SETTINGS),
    "relu-eps": ("NystromformerModel", {**SETTINGS, "hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "as many landmarks as tokens": ("NystromformerModel", {**SETTINGS, "num_landmarks": N}),
    "mlm": ("NystromformerForMaskedLM", SETTINGS),
    "classifier": ("NystromformerForSequenceClassification", {**SETTINGS, "num_labels": 3}),
    "tokens": ("NystromformerForTokenClassification", {**SETTINGS, "num_labels": 5}),
}


def of_each_matrix(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its other way to begin the inverse, which a config cannot ask for without an error."""
    for module in model.modules():
        if hasattr(module, "init_option"):
            module.init_option = "exact"
    return model.double()


@pytest.mark.parametrize(("model_class", "settings"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_texts_without_padding_get_what_transformers_gives(model_class: str, settings: dict, tmp_path: Path) -> None:
    theirs = tiny.build(model_class, settings)
    ours = load_checkpoint(tiny.save(theirs, tmp_path), dtype=torch.float64)
    inputs = tiny.batch((N, N), pad_id=1, n_types=2)
    theirs = of_each_matrix(theirs)
    expected = (theirs.base_model if model_class.endswith("MaskedLM") else theirs)(**inputs)[0]
    result = ours.model(inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"])
    assert ours.config.attention == "nystromformer"
    assert not ours.untrained
    got = result if isinstance(result, torch.Tensor) else result.token_embeddings
    assert (got - expected).abs().max() <= EXACT * expected.abs().max().clamp(min=1)
