"""A checkpoint that is broken or hostile is refused in one sentence, before memory is taken for it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.decoder import load_decoder
from models.checkpoints.published import load_checkpoint
from models.folders.folder import CheckpointError
from tests.checkpoints import tiny_classifier, tiny_encoder
from tests.decoders import tiny_decoder
from tests.encoder_decoders import tiny_encoder_decoder
from tests.models.checkpoints.tiny import BERT, MODERNBERT
from tests.models.checkpoints.tiny import DEBERTA as ALL_OF_DEBERTA

EXAMPLES = int(os.environ.get("ATTNSERVE_HOSTILE_EXAMPLES", "15"))
GiB = 2**30
DEBERTA = {key: value for key, value in ALL_OF_DEBERTA.items() if key not in BERT}  # what it has beside the settings of a BERT


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_no_change_of_a_checkpoint_ends_in_anything_but_a_sentence_or_takes_a_gibibyte(tmp_path: Path) -> None:
    """ATTNSERVE_HOSTILE_EXAMPLES sets how many are tried of each family."""
    tiny_encoder(tmp_path / "encoder")
    tiny_classifier(tmp_path / "classifier")
    tiny_decoder(tmp_path / "decoder")
    tiny_encoder_decoder(tmp_path / "writer")
    command = [sys.executable, "-m", "tests.models.checkpoints.hostile", str(tmp_path), str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert found["peak_bytes"] < GiB


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": "str"}, "hidden_size='str' is not accepted"),
        ({"hidden_size": True}, "hidden_size=True is not accepted"),
        ({"hidden_size": 2**24}, "has shape"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers=100000 is not accepted"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not accepted"),
        ({"num_hidden_layers": 60}, "missing from the weights"),
        ({"architectures": []}, r"architectures=\[\] is not accepted"),
        ({"architectures": [["BertModel"]]}, "architectures=.* is not accepted"),
        ({"architectures": "BertModel"}, "architectures='BertModel' is not accepted"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not accepted"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps='x' is not accepted"),
        ({"hidden_act": ["gelu"]}, "hidden_act=.* is not accepted"),
        ({"vocab_size": 2**23}, "has shape"),
        ({"architectures": ["T5Model"]}, "architecture 'T5Model' is not supported; supported: BertModel, .*NomicBertModel"),
        ({"architectures": None}, "has no 'architectures'"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"num_attention_heads": 7}, r"d_model=\d+ is not divisible by n_heads=7"),
        ({"architectures": ["AlbertModel"], "num_hidden_groups": 2}, "num_hidden_groups=2 is not supported"),
        ({"architectures": ["AlbertModel"], "inner_group_num": 3}, "inner_group_num=3 is not supported"),
        ({"architectures": ["AlbertModel"], "embedding_size": 0}, "embedding_size=0 is not accepted"),
        ({"architectures": ["AlbertModel"], "embedding_size": 2**24}, "missing from the weights"),
        ({"architectures": ["DebertaV2Model"]}, "relative_attention=None is not supported"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "conv_kernel_size": 3}, "conv_kernel_size=3 is not supported"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "share_att_key": False}, "share_att_key=False is not supported"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "norm_rel_ebd": "none"}, "norm_rel_ebd='none' is not supported"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "embedding_size": 3}, "embedding_size=3 is not supported"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "pos_att_type": "p2p"}, "pos_att_type='p2p' must list some of c2p, p2c"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "pos_att_type": []}, r"pos_att_type=\[\] must list some of c2p, p2c"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "position_buckets": 10**9}, "position_buckets=1000000000 is not accepted"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "position_buckets": 1}, "span=1 must be at least 2"),
        ({"architectures": ["DebertaV2Model"], **DEBERTA, "max_relative_positions": 3}, "max_distance=3 must be above"),
        ({"architectures": ["ElectraModel"], "embedding_size": "x"}, "embedding_size='x' is not accepted"),
        ({"architectures": ["ElectraModel"], "embedding_size": 2**24}, "missing from the weights"),
        ({"architectures": ["MPNetModel"], "relative_attention_num_buckets": 64}, "relative_attention_num_buckets=64 is not supported"),
        ({"architectures": ["NomicBertModel"], "rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"architectures": ["ModernBertModel"], **MODERNBERT, "layer_types": ["full_attention", "dilated"]}, "layer_types has 'dilated'"),
        (
            {
                "architectures": ["ModernBertModel"],
                **MODERNBERT,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2}},
            },
            "rope_type='linear' is not supported",
        ),
    ],
)
def test_a_config_is_refused_with_its_key_and_value(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    folder = tiny_encoder(tmp_path / "encoder")
    changed(folder / "config.json", **values)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(folder)


def test_what_stands_beside_the_config_is_checked_too(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "encoder")
    changed(folder / "sentence_bert_config.json", max_seq_length=-5)
    with pytest.raises(CheckpointError, match="max_seq_length=-5 is not accepted"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../x"}}, {"weight_map": "x"}]
)
def test_an_index_of_other_types_is_refused(tmp_path: Path, index: Any) -> None:
    folder = tiny_encoder(tmp_path / "encoder")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_checkpoint(folder)


def link(file: Path, secret: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(secret)


def fifo(file: Path, secret: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def folder_of_that_name(file: Path, secret: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def zeros(file: Path, secret: Path) -> None:
    link(file, Path("/dev/zero"))


@pytest.mark.parametrize("put", [link, fifo, folder_of_that_name, zeros])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "generation_config.json", "tokenizer_config.json"]
)
def test_nothing_but_files_of_the_folder_is_read(tmp_path: Path, name: str, put: Callable[[Path, Path], None]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    folder = tiny_decoder(tmp_path / "decoder")
    put(folder / name, secret)
    with pytest.raises(CheckpointError, match=name):
        load_decoder(folder)


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """`snapshots/REVISION` holds links to the `blobs` beside it."""
    folder = tiny_encoder(tmp_path / "snapshots" / "abc")
    (tmp_path / "blobs").mkdir()
    (folder / "config.json").rename(tmp_path / "blobs" / "123")
    (folder / "config.json").symlink_to("../../blobs/123")
    assert load_checkpoint(folder).kind == "encoder"
