"""Reads and writes decoder checkpoints. Training writes the folder below and the export reads it. Folders of published decoders
can be read too (see `families/`).

FOLDER/
  config.json           {"architectures": ["AttnserveDecoder"], "attnserve_decoder": {the fields of DecoderConfig},
                         "eos_token_id": number, list or null, "bos_token_id": number or null,
                         "image": {the fields of ImageFormat}, only if the decoder generates images}
  model.safetensors     the parameters by name; tied weights are stored once
  tokenizer.json        in the format of the package `tokenizers`
  chat_template.jinja   optional (chat.py reads it, and the forms of published checkpoints)
  README.md             the model card, optional
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoints.chat import CHAT_TEMPLATE, begin_token_id, chat_template, end_token_ids
from models.checkpoints.families import DECODERS
from models.checkpoints.families.decoder_family import DecoderFamily
from models.checkpoints.own import CONFIG, TOKENIZER, fill_places, save_folder, tokenizer_file, weights_sha256
from models.checkpoints.weights import check_names, copy_rows
from models.decoder.model import Decoder, DecoderConfig
from models.folders.config_fields import validated
from models.folders.folder import CheckpointError, JsonSettings, errors_of, read_settings, read_tensors, rehearsed, rehearsing

ARCHITECTURE = "AttnserveDecoder"
MOST_PIXELS = 1024  # largest width or height of an image


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """The format of the images that a decoder generates. After a prompt come `width * height` tokens. Each token is the grey level of
    a pixel, row by row from the upper left.

    Raises ValueError, with the value, if a field is invalid.
    """

    width: int
    height: int
    level_token_ids: tuple[int, ...]  # token ids of the grey levels, in equal steps from black to white
    prompts: tuple[str, ...]  # all allowed prompts

    def __post_init__(self) -> None:
        if not all(isinstance(side, int) and 1 <= side <= MOST_PIXELS for side in (self.width, self.height)):
            raise ValueError(f"width={self.width!r} and height={self.height!r} must be whole numbers from 1 to {MOST_PIXELS}")
        ids = self.level_token_ids
        if not all(isinstance(token, int) and token >= 0 for token in ids) or not 2 <= len(set(ids)) == len(ids) <= 256:
            raise ValueError(f"level_token_ids={ids} must be 2 to 256 different tokens")
        if not self.prompts or not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError(f"prompts={self.prompts} must be one or more texts")

    @property
    def n_pixels(self) -> int:
        return self.width * self.height


@dataclass(frozen=True, kw_only=True)
class DecoderCheckpoint:
    """A loaded decoder, in eval mode, with the settings of its folder."""

    model: Decoder
    config: DecoderConfig
    architecture: str  # the name in config.json
    folder: Path
    tokenizer_file: Path
    eos_token_ids: tuple[int, ...]  # any of these tokens ends a text; the first is a chat template's `eos_token`
    bos_token_id: int | None
    chat_template: str | None  # its source
    image: ImageFormat | None
    weights_sha256: str


def save_decoder(
    folder: Path,
    decoder: Decoder,
    *,
    tokenizer: str,
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    chat_template: str | None = None,
    image: ImageFormat | None = None,
) -> None:
    """Write the decoder to `folder`. The weights keep their dtype. `tokenizer` is the content of tokenizer.json, and `chat_template` the
    content of chat_template.jinja, which is not written if it is None.
    """
    config = {
        "architectures": [ARCHITECTURE],
        "attnserve_decoder": asdict(decoder.config),
        "eos_token_id": list(eos_token_ids) or None,
        "bos_token_id": bos_token_id,
        **({} if image is None else {"image": asdict(image)}),
    }
    save_folder(folder, _places(decoder), {TOKENIZER: tokenizer, CHAT_TEMPLATE: chat_template}, config)


@rehearsed
def load_decoder(folder: Path, *, dtype: torch.dtype = torch.float32, settings: JsonSettings | None = None) -> DecoderCheckpoint:
    """Load the decoder in `folder`, which `save_decoder` wrote or which is a published checkpoint of a family in DECODERS. Its weights
    are cast to `dtype`. `settings` is the folder's config.json, if the caller has already read it.

    Raises CheckpointError if anything in the folder is missing, unexpected or unsupported.
    """
    folder = Path(folder)
    settings = settings or read_settings(folder / CONFIG)
    architecture = settings.need("architectures")[0]
    model = _read_model(architecture, settings, dtype)
    return DecoderCheckpoint(
        model=model,
        config=model.config,
        architecture=architecture,
        folder=folder,
        tokenizer_file=tokenizer_file(folder),
        eos_token_ids=end_token_ids(settings, model.config.vocab_size),
        bos_token_id=begin_token_id(settings, model.config.vocab_size),
        chat_template=chat_template(folder),
        image=_image(settings, model.config) if architecture == ARCHITECTURE else None,
        weights_sha256="" if rehearsing() else weights_sha256(folder),
    )


# Loading the model and its tensors


def _read_model(architecture: str, settings: JsonSettings, dtype: torch.dtype) -> Decoder:
    if architecture not in (ARCHITECTURE, *DECODERS):
        supported = ", ".join((ARCHITECTURE, *DECODERS))
        raise CheckpointError(f"{settings.file}: architecture {architecture!r} is not supported; supported decoders: {supported}")
    family = DECODERS.get(architecture)
    with errors_of(settings.file):
        own = "attnserve_decoder"
        config = validated(DecoderConfig, settings.need(own), own) if family is None else family.decoder_config(settings)
        decoder = Decoder(config, dtype=dtype).eval()
    tensors = read_tensors(settings.file.parent)
    if family is None:
        fill_places(_places(decoder), tensors)
    else:
        _fill_from(family, decoder, tensors)
    return decoder


def _fill_from(family: DecoderFamily, decoder: Decoder, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors of a published checkpoint into `decoder`, cast to the decoder's dtype.

    Raises CheckpointError if a tensor is missing, is unexpected (neither needed nor listed in `DecoderFamily.unused`) or has another
    shape than in the decoder.
    """
    other = family.prefix_beside_vision
    prefix = other if other is not None and any(name.startswith(other) for name in tensors) else family.prefix
    sources = {}
    for source in family.sources(decoder.config):
        inside = source.theirs.startswith(family.prefix)
        sources[prefix + source.theirs.removeprefix(family.prefix) if inside else source.theirs] = source
    check_names({theirs: list(source.ours) for theirs, source in sources.items()}, tensors, harmless=family.unused)
    places = decoder.state_dict()  # these tensors share memory with the decoder
    unplaced = places.keys() - {ours for source in sources.values() for ours in source.ours}
    assert unplaced == ({"unembedding.weight"} if decoder.config.tied else set()), f"no name in the checkpoint for {unplaced}"
    for theirs, source in sources.items():
        copy_rows(source.read(tensors[theirs]), [places[ours] for ours in source.ours], theirs)


def _places(decoder: Decoder) -> dict[str, Tensor]:
    """Return the decoder's tensors by name. They share memory with the decoder. A tied unembedding is left out, as it is the embedding."""
    return {name: tensor for name, tensor in decoder.state_dict().items() if not (decoder.config.tied and name == "unembedding.weight")}


# Image settings


def _image(settings: JsonSettings, config: DecoderConfig) -> ImageFormat | None:
    values = settings.get("image", None)
    if values is None:
        return None
    try:
        image = ImageFormat(**(values | {name: tuple(values[name]) for name in ("level_token_ids", "prompts")}))
        if (worst := max(image.level_token_ids)) >= config.vocab_size:
            raise ValueError(f"level_token_ids has {worst}, which is not in the vocabulary, 0 to {config.vocab_size - 1}")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{settings.file}: image: {error!r}; correct or remove it") from error
    return image
