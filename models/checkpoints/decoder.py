"""A decoder as a folder, written by training and read by the export; published decoders are read from folders of their own kind.

FOLDER/
  config.json           {"architectures": ["AttnserveDecoder"], "attnserve_decoder": {the fields of DecoderConfig},
                         "eos_token_id": number, list or null, "bos_token_id": number or null,
                         "image": {the fields of Image}, where its tokens are pixels}
  model.safetensors     the parameters by name; tied weights are there once
  tokenizer.json        of `tokenizers`
  chat_template.jinja   optional
  README.md             the model card, optional
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoints.decoder_weights import fill_decoder
from models.checkpoints.families import DECODERS
from models.checkpoints.weights import check_names, copy_rows
from models.decoder.model import Decoder, DecoderConfig
from models.folders.config_fields import validated
from models.folders.folder import (
    MOST_TEMPLATE_BYTES,
    MOST_TOKENIZER_BYTES,
    WEIGHTS,
    CheckpointError,
    Settings,
    present,
    read_settings,
    read_tensors,
    regular,
    rehearsed,
    rehearsing,
)

ARCHITECTURE = "AttnserveDecoder"
MOST_PIXELS = 1024  # of an image's side
CONFIG, TOKENIZER, CHAT_TEMPLATE, CARD = "config.json", "tokenizer.json", "chat_template.jinja", "README.md"


@dataclass(frozen=True, kw_only=True)
class Image:
    """The pictures of a decoder of pixels: `width * height` tokens after a prompt, row by row from the upper left, each a grey level.

    Raises ValueError, with the values, for an impossible image.
    """

    width: int
    height: int
    level_token_ids: tuple[int, ...]  # of the grey levels, black first, in even steps
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
    architecture: str  # as config.json names it
    folder: Path
    tokenizer_file: Path
    eos_token_ids: tuple[int, ...]  # each of them ends a text
    bos_token_id: int | None
    chat_template: Path | None
    image: Image | None
    weights_sha256: str


def save_decoder(
    folder: Path,
    decoder: Decoder,
    *,
    tokenizer: str,
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    chat_template: str | None = None,
    image: Image | None = None,
) -> None:
    """Write `folder`, with the weights in their present dtype. `tokenizer` and `chat_template` are the texts of their files.

    config.json comes last: a folder that was not finished is no checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in _places(decoder).items()}, folder / WEIGHTS)
    for name, text in ((TOKENIZER, tokenizer), (CHAT_TEMPLATE, chat_template)):
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    config = {
        "architectures": [ARCHITECTURE],
        "attnserve_decoder": asdict(decoder.config),
        "eos_token_id": list(eos_token_ids) or None,
        "bos_token_id": bos_token_id,
        **({} if image is None else {"image": asdict(image)}),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


@rehearsed
def load_decoder(folder: Path, *, dtype: torch.dtype = torch.float32, settings: Settings | None = None) -> DecoderCheckpoint:
    """Read `folder`, ours or one of a family in DECODERS, its weights cast to `dtype`. `settings` are those of its config.json, if read.

    Raises CheckpointError for everything that is missing, unexpected or unsupported there.
    """
    folder = Path(folder)
    settings = settings or read_settings(folder / CONFIG)
    architecture = settings.need("architectures")[0]
    model = _read_model(architecture, settings, dtype)
    tokenizer_file, chat_template = folder / TOKENIZER, folder / CHAT_TEMPLATE
    if not present(tokenizer_file):
        raise CheckpointError(f"{tokenizer_file} is missing; copy it from where the model was saved")
    regular(tokenizer_file, most_bytes=MOST_TOKENIZER_BYTES)
    if present(chat_template):
        regular(chat_template, most_bytes=MOST_TEMPLATE_BYTES)
    bos_token_ids = _token_ids("bos_token_id", settings, model.config)
    return DecoderCheckpoint(
        model=model,
        config=model.config,
        architecture=architecture,
        folder=folder,
        tokenizer_file=tokenizer_file,
        eos_token_ids=_token_ids("eos_token_id", settings, model.config),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        chat_template=chat_template if present(chat_template) else None,
        image=_image(settings, model.config) if architecture == ARCHITECTURE else None,
        weights_sha256="" if rehearsing() else weights_sha256(folder),
    )


# The model and its tensors


def _read_model(architecture: str, settings: Settings, dtype: torch.dtype) -> Decoder:
    if architecture not in (ARCHITECTURE, *DECODERS):
        supported = ", ".join((ARCHITECTURE, *DECODERS))
        raise CheckpointError(f"{settings.file}: architecture {architecture!r} is not supported; supported: {supported}")
    family = DECODERS.get(architecture)
    try:
        config = _config(settings) if family is None else family.decoder_config(settings)
        decoder = Decoder(config, dtype=dtype).eval()
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{settings.file}: {error}") from error
    tensors = read_tensors(settings.file.parent)
    if family is None:
        _fill(decoder, tensors)
    else:
        fill_decoder(decoder, tensors, family)
    return decoder


def _fill(decoder: Decoder, tensors: dict[str, Tensor]) -> None:
    places = _places(decoder)
    check_names({name: [name] for name in places}, tensors, harmless=())
    for name, place in places.items():
        copy_rows(tensors[name], [place], name)


def _config(settings: Settings) -> DecoderConfig:
    """Raises ValueError for an unknown or missing field."""
    values = dict(settings.need("attnserve_decoder"))
    known = {field.name: field for field in fields(DecoderConfig)}
    if unknown := values.keys() - known.keys():
        raise ValueError(f"attnserve_decoder has {min(unknown)!r}, which is not one of {', '.join(known)}")
    needed = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := needed - values.keys():
        raise ValueError(f"attnserve_decoder has no {min(missing)!r}")
    if isinstance(values["layers"], list):
        values["layers"] = tuple(values["layers"])
    return validated(DecoderConfig, values)


def _places(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's tensors by name, in memory shared with it. A tied unembedding is the embedding."""
    return {name: tensor for name, tensor in decoder.state_dict().items() if not (decoder.config.tied and name == "unembedding.weight")}


# Other files of the folder


def _token_ids(key: str, settings: Settings, config: DecoderConfig) -> tuple[int, ...]:
    """Of generation_config.json where it says more than config.json, as a chat model's does: one number, a list, or nothing."""
    generation = read_settings(settings.file.parent / "generation_config.json", required=False)
    text = settings.get("text_config", {})
    found = generation.get(key, settings.get(key, text.get(key)))
    ids = () if found is None else tuple(found) if isinstance(found, list) else (found,)
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise CheckpointError(f"{settings.file}: {key}={found!r} is not in the vocabulary, 0 to {config.vocab_size - 1}; correct it")
    return ids


def _image(settings: Settings, config: DecoderConfig) -> Image | None:
    values = settings.get("image", None)
    if values is None:
        return None
    try:
        image = Image(**(values | {name: tuple(values[name]) for name in ("level_token_ids", "prompts")}))
        if (worst := max(image.level_token_ids)) >= config.vocab_size:
            raise ValueError(f"level_token_ids has {worst}, which is not in the vocabulary, 0 to {config.vocab_size - 1}")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{settings.file}: image: {error!r}; correct it, or take it out") from error
    return image


def weights_sha256(folder: Path) -> str:
    """Of the one file, or of the hashes of the shards in the order of their names."""
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
