"""The maps of a model are the matrices of its layers, on what those layers get in it."""

import pytest
import torch

from models.encoder.model import Encoder, EncoderConfig
from models.maps.matrix import attention_matrix
from models.maps.model import attention_maps
from tests.decoders import random_decoder

IDS = torch.tensor([[5, 3, 8, 1, 1, 9]])
SHAPE = {"vocab_size": 11, "d_model": 12, "n_layers": 2, "n_heads": 3, "d_feedforward": 16, "n_positions": 16}


@pytest.mark.parametrize("attention", ["softmax", "linear", "gau"])
def test_of_an_encoder(attention: str) -> None:
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**SHAPE, attention=attention)).eval()
    maps = attention_maps(encoder, IDS)
    assert [each.layer for each in maps] == [attention] * 2
    x = encoder.embeddings(IDS, torch.arange(6), None)
    assert torch.allclose(maps[0].A, attention_matrix(encoder.blocks[0].attention, x)[0])
    if attention != "gau":
        assert maps[1].A.shape == (3, 6, 6)
        assert torch.allclose(maps[1].A.sum(-1), torch.ones(3, 6), atol=1e-4)


def test_rotations_and_windows_reach_the_layers() -> None:
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**SHAPE, positions="rotary", windows=(1, None))).eval()
    near, far = attention_maps(encoder, IDS)
    assert not near.A.triu(2).any()
    assert (far.A > 0).all()
    first = [each.A for each in attention_maps(encoder, IDS[:, :1].expand(1, 6))]  # one token six times: only its place differs
    assert (first[1] - first[1].mean(-1, keepdim=True)).abs().max() > 0


def test_of_a_decoder_with_unlike_layers() -> None:
    decoder = random_decoder(n_layers=3, layers=("causal_softmax", "gated_delta", "causal_linear"), positions="none")
    maps = attention_maps(decoder, IDS)
    assert [each.layer for each in maps] == ["causal_softmax", "gated_delta", "causal_linear"]
    assert not any(each.A.triu(1).any() for each in maps)


def test_the_model_is_left_as_it_was() -> None:
    decoder = random_decoder()
    before = decoder(IDS)[0]
    attention_maps(decoder, IDS)
    assert torch.equal(decoder(IDS)[0], before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in decoder.modules())
