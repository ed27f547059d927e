"""BigBird: a BERT in which each block of tokens attends to its neighbours, to the first and last block and to random blocks.

Zaheer et al. 2020, arXiv:2007.14062. Random blocks are used in inference too, as in the paper. `transformers` differs in
inference: it replaces every random block by block 0 and counts block 0 once for each. On texts of up to 5 + 2 r blocks, with r
random blocks, both are full attention.
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
    """Return the activation of the feed-forward layers and of the classifier's head."""
    return settings.pick("hidden_act", "gelu_new", ACTIVATION_NAMES)


BIGBIRD = Family(
    prefix="bert.",
    encoder_config=encoder_config,
    encoder_names=(bert.ENCODER_NAMES,),
    sequence_head=lambda settings: HeadConfig(activation=activation(settings)),
    unused=("pooler.", "cls."),
    reads_token_types=True,
)
