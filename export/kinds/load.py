"""Loads a checkpoint folder with the exporter of its kind, which is chosen by the architecture in config.json."""

import re
from pathlib import Path

from export.kinds.decoder import DecoderExporter
from export.kinds.encoder import EncoderExporter
from export.kinds.encoder_decoder import EncoderDecoderExporter
from export.kinds.exporter import Exporter, Options
from models.checkpoints.own import CONFIG
from models.folders.folder import WEIGHTS, WEIGHTS_INDEX, CheckpointError, present, read_settings

KINDS: tuple[type[Exporter], ...] = (EncoderDecoderExporter, DecoderExporter)
ADAPTER, BASE = "adapter_config.json", "base_model_name_or_path"  # of the package peft
GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of the names of architectures that generate text


def load(checkpoint: Path, options: Options) -> Exporter:
    """Load a checkpoint: as an encoder, whose config.json may be in a subfolder, unless another exporter lists its architecture or it
    generates text. Raises CheckpointError for an invalid folder, and ExportError for options that its kind does not support.
    """
    _check_folder(checkpoint)
    settings = read_settings(checkpoint / CONFIG) if present(checkpoint / CONFIG) else None
    named = [] if settings is None else settings.get("architectures", [])
    other = DecoderExporter if named and named[0].endswith(GENERATIVE) else EncoderExporter
    kind = next((kind for kind in KINDS if named and named[0] in kind.architectures), other)
    return kind(checkpoint, settings, options)


def _check_folder(checkpoint: Path) -> None:
    if checkpoint.is_dir():
        if present(checkpoint / ADAPTER) and not any(present(checkpoint / name) for name in (WEIGHTS, WEIGHTS_INDEX)):
            base = read_settings(checkpoint / ADAPTER).values.get(BASE, "")
            raise CheckpointError(
                f"{checkpoint} is an adapter (LoRA), which only changes the weights of its base. Merge it into its base first, with peft: "
                f'PeftModel.from_pretrained(base, "{checkpoint}").merge_and_unload().save_pretrained("merged"), where base is the model '
                f"{base!r:.80} as transformers loads it. Copy the tokenizer of the base into that folder, then give the folder"
            )
        return
    if present(checkpoint):
        raise CheckpointError(f"{checkpoint} is not a folder; give the folder that has it, with config.json and tokenizer.json, or a .gguf")
    problem = f"there is no folder {checkpoint.name} in {checkpoint.absolute().parent}; check the path"
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(checkpoint)) and (checkpoint.name == str(checkpoint) or not present(checkpoint.parent)):
        problem += (
            f". If {checkpoint} is an id of the Hugging Face hub, download it (pip install huggingface_hub; "
            f"hf download {checkpoint} --local-dir {checkpoint.name}), then give that folder"
        )
    raise CheckpointError(problem)
