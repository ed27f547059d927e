"""DistilBERT: a BERT without token types and with other tensor names. Sanh et al. 2019, arXiv:1910.01108."""

from models.checkpoints.families.family import ACTIVATION_NAMES, Family, HeadConfig, MaskedHead, Names
from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings


def encoder_config(settings: JsonSettings) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=settings.need("vocab_size"),
        d_model=settings.need("dim"),
        n_layers=settings.need("n_layers"),
        n_heads=settings.need("n_heads"),
        d_feedforward=settings.need("hidden_dim"),
        # The position table is in the weights even if sinusoidal_pos_embds is set, so it is always loaded.
        n_positions=settings.need("max_position_embeddings"),
        activation=settings.pick("activation", "gelu", ACTIVATION_NAMES),
        norm_eps=1e-12,
    )


ENCODER_NAMES: Names = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.LayerNorm": "embeddings.norm",
    "transformer.layer.{i}.attention.q_lin": "blocks.{i}.attention.to_q",
    "transformer.layer.{i}.attention.k_lin": "blocks.{i}.attention.to_k",
    "transformer.layer.{i}.attention.v_lin": "blocks.{i}.attention.to_v",
    "transformer.layer.{i}.attention.out_lin": "blocks.{i}.attention.to_out",
    "transformer.layer.{i}.sa_layer_norm": "blocks.{i}.attention_norm",
    "transformer.layer.{i}.ffn.lin1": "blocks.{i}.feedforward.up",
    "transformer.layer.{i}.ffn.lin2": "blocks.{i}.feedforward.down",
    "transformer.layer.{i}.output_layer_norm": "blocks.{i}.feedforward_norm",
}

DISTILBERT = Family(
    prefix="distilbert.",
    encoder_config=encoder_config,
    encoder_names=(ENCODER_NAMES,),
    sequence_head=lambda settings: HeadConfig(activation="relu"),
    sequence_names={"pre_classifier": "transform.linear", "classifier": "classifier"},
    unused=("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
    masked_head=MaskedHead(
        transform="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        bias="vocab_projector.bias",
        activation=lambda settings: settings.pick("activation", "gelu", ACTIVATION_NAMES),
    ),
)
