"""BigBird: a BERT in which each block of tokens attends to its neighbours, to the first and last block and to random blocks.

Zaheer et al. 2020, arXiv:2007.14062. Random blocks are used in inference too, as in the paper. `transformers` differs in
inference: it replaces every random block by block 0, so that block 0 enters the softmax several times. With r random blocks per
block, texts of up to 5 + 2 r blocks get full attention, here and in `transformers`.
"""

from dataclasses import replace

from models.checkpoints.families import bert
from models.checkpoints.families.family import ACTIVATION_NAMES, Family, HeadConfig
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    settings.allow("rescale_embeddings", False)
    settings.allow("use_bias", True)
    config = replace(bert.encoder_config(settings), activation=activation(settings))
    kinds = {"block_sparse": "bigbird", "original_full": "softmax"}
    if settings.pick("attention_type", "block_sparse", kinds) == "softmax":
        return config
    options = {"block": settings.get("block_size", 64), "n_random": settings.get("num_random_blocks", 3), "n_positions": config.n_positions}
    return replace(config, attention="bigbird", attention_options=options)


def activation(settings: JsonSettings) -> str:
    """Return the name of the activation that the feed-forward layers and the classifier's head use."""
    return settings.pick("hidden_act", "gelu_new", ACTIVATION_NAMES)


BIGBIRD = Family(
    prefix="bert.",
    encoder_config=encoder_config,
    encoder_names=(bert.ENCODER_NAMES,),
    sequence_head=lambda settings: HeadConfig(activation=activation(settings)),
    unused=("pooler.", "cls."),
    reads_token_types=True,
)
