"""The BERT family: post-norm, learned positions, token types. Devlin et al. 2018, arXiv:1810.04805.

MiniLM, E5, BGE and the first GTE models use this architecture.
"""

from models.checkpoints.families.family import ACTIVATION_NAMES, Family, MaskedHead, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    settings.allow("position_embedding_type", "absolute")
    settings.allow("is_decoder", False)
    settings.allow("add_cross_attention", False)
    return EncoderConfig(
        vocab_size=settings.need("vocab_size"),
        d_model=settings.need("hidden_size"),
        n_layers=settings.need("num_hidden_layers"),
        n_heads=settings.need("num_attention_heads"),
        d_feedforward=settings.need("intermediate_size"),
        n_positions=settings.need("max_position_embeddings"),
        n_token_types=settings.get("type_vocab_size", 2),
        activation=settings.pick("hidden_act", "gelu", ACTIVATION_NAMES),
        norm_eps=settings.get("layer_norm_eps", 1e-12),
    )


ENCODER_NAMES: Names = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer.{i}.attention.self.query": "blocks.{i}.attention.to_q",
    "encoder.layer.{i}.attention.self.key": "blocks.{i}.attention.to_k",
    "encoder.layer.{i}.attention.self.value": "blocks.{i}.attention.to_v",
    "encoder.layer.{i}.attention.output.dense": "blocks.{i}.attention.to_out",
    "encoder.layer.{i}.attention.output.LayerNorm": "blocks.{i}.attention_norm",
    "encoder.layer.{i}.intermediate.dense": "blocks.{i}.feedforward.up",
    "encoder.layer.{i}.output.dense": "blocks.{i}.feedforward.down",
    "encoder.layer.{i}.output.LayerNorm": "blocks.{i}.feedforward_norm",
}

BERT = Family(
    prefix="bert.",
    encoder_config=encoder_config,
    encoder_names=(ENCODER_NAMES,),
    sequence_names={"bert.pooler.dense": "transform.linear", "classifier": "classifier"},
    unused=("pooler.", "cls."),
    masked_head=MaskedHead(
        transform="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
    ),
    reads_token_types=True,
)
