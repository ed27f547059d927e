"""The types and bounds of all keys that are read from config.json and the other settings files.

A key has the same type and bounds in all files and families. A value of another type, or one larger than in any real model, is
rejected when it is read. Keys that are not listed here are not read.
"""

import json
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

Size = Annotated[int, Field(strict=True, ge=1, le=2**24)]  # e.g. of a vocabulary, a width, a length
Layers = Annotated[int, Field(strict=True, ge=1, le=512)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**16)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**24)]
Real = Annotated[float, Field(strict=True, gt=0, le=1e30, allow_inf_nan=False)]
Limit = Annotated[float, Field(strict=True, ge=1, le=1e40)]  # token limit of a tokenizer; transformers writes 1e30 for no limit
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(max_length=100_000)]
Template = Annotated[str, Field(max_length=2**20)]
Texts = Annotated[list[Text], Field(max_length=2**16)]
Sizes = Annotated[list[Size], Field(min_length=1, max_length=1024)]
Object = dict[str, Any]

_KINDS: dict[Any, str] = {
    Size: "vocab_size hidden_size num_attention_heads intermediate_size max_position_embeddings dim n_heads hidden_dim n_positions n_embd "
    "embedding_size "
    "n_inner n_head feed_forward_size attention_head_size head_dim block_size num_landmarks conv_kernel_size in_features out_features "
    "linear_num_value_heads linear_num_key_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim num_key_value_heads "
    "full_attention_interval global_attn_every_n_layers local_attention num_hashes lsh_attn_chunk_length local_attn_chunk_length "
    "sliding_window original_max_position_embeddings softmax_tokens query_length document_length "
    "query_maxlen doc_maxlen input_dim k length",
    Layers: "num_hidden_layers n_layers n_layer",
    Count: "type_vocab_size num_labels num_random_blocks lsh_num_chunks_before lsh_num_chunks_after local_num_chunks_before "
    "local_num_chunks_after max_window_layers",
    Annotated[int, Field(strict=True, ge=0, lt=2**63)]: "hash_seed",
    Annotated[int, Field(strict=True, ge=-1, le=2**16)]: "max_relative_positions position_buckets",
    Limit: "max_seq_length model_max_length max_length",
    TokenId: "pad_token_id",
    TokenId | list[TokenId]: "eos_token_id bos_token_id",
    Real: "layer_norm_eps layer_norm_epsilon norm_eps rms_norm_eps rope_theta rotary_emb_base global_rope_theta local_rope_theta "
    "partial_rotary_factor factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim",
    Flag: "bias mlp_bias norm_bias attention_bias classifier_bias is_decoder do_lower_case tie_word_embeddings axial_pos_embds normalized "
    "untrained pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens pooling_mode_mean_sqrt_len_tokens "
    "pooling_mode_weightedmean_tokens pooling_mode_lasttoken normalize relative_attention share_att_key position_biased_input "
    "use_sliding_window truncate strip_accents tokenize_chinese_chars do_query_expansion "
    "attend_to_expansion_tokens attend_to_mask_tokens mask_punctuation attend",
    Text: "hidden_act hidden_activation activation activation_function activation_fn attention_type classifier_pooling type rope_type "
    "classifier_activation pooler_hidden_act norm_rel_ebd pooling problem_type default_prompt_name sbert_ce_default_activation_function "
    "pooling_strategy model_type similarity_fn_name query_prefix document_prefix query_token_id doc_token_id strategy token path",
    Text | Texts: "pooling_mode pos_att_type",
    Text | Object: "eos_token bos_token unk_token sep_token pad_token cls_token mask_token",
    Annotated[list[Text | Object], Field(max_length=2**16)]: "additional_special_tokens",
    Template | Annotated[list[dict[str, Template]], Field(max_length=100)]: "chat_template",
    Annotated[list[Text], Field(min_length=1, max_length=100)]: "architectures",
    Annotated[list[Text], Field(min_length=1, max_length=1024)]: "layer_types attn_layers",
    Texts: "examples skiplist_words",
    Size | Sizes: "attention_window num_buckets",
    Sizes: "axial_pos_shape axial_pos_embds_dim",
    Object: "attnserve_encoder attnserve_decoder attnserve_encoder_decoder text_config rope_parameters rope_scaling full_attention "
    "sliding_attention sentence_transformers image added_tokens_decoder query_expansion types",
    dict[Text, Annotated[list[Text], Field(max_length=100)]]: "structure",
    dict[Text, Text | None]: "prompts",
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,5}$")], Text]: "id2label",
    dict[Text, Text]: "weight_map",
}
_ADAPTERS = {key: TypeAdapter(kind) for kind, keys in _KINDS.items() for key in keys.split()}


def checked(key: str, value: Any) -> Any:
    """Return the value of `key` unchanged. Raises ValueError, with the reason, if it has the wrong type or is out of bounds."""
    try:
        _ADAPTERS[key].validate_python(value)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    return value


Config = TypeVar("Config")
MOST_LAYERS, MOST_OPTION, MOST_VALUES = 512, 2**20, 10_000


def validated(kind: type[Config], values: dict[str, Any], key: str) -> Config:
    """Return a config of the class `kind` with the fields `values`, which a JSON file has under `key`. Raises ValueError, with a message
    of one line, for the first invalid field.
    """
    known = {field.name: field for field in fields(cast(Any, kind))}
    if unknown := values.keys() - known.keys():
        raise ValueError(f"{key} has {min(unknown)!r}, which is not one of {', '.join(known)}")
    needed = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := needed - values.keys():
        raise ValueError(f"{key} lacks the field {min(missing)!r}")
    text = json.dumps(bounded(values))  # because pydantic's strict mode accepts a list for a tuple only in JSON
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        said, place = first["msg"].removeprefix("Value error, "), ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}={first['input']!r:.80}: {said}" if place else said) from None


def bounded(values: Any) -> dict[str, Any]:
    """Return `values`, the fields of a config, as a new dict. Raises ValueError if a number or a list in it is larger than in any real
    model. The types of the fields are not checked here, since the config class does so.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{values!r:.80} should be an object")
    for key, value in values.items():
        _check_bounds(key, value, MOST_LAYERS if str(key).startswith("n_") and str(key).endswith("layers") else 2**24)
    return dict(values)


def _check_bounds(key: Any, value: Any, most: int, depth: int = 0) -> None:
    if isinstance(value, int | float) and not abs(value) <= (most if isinstance(value, int) else 1e30):
        raise ValueError(f"{key}={value!r:.80} is above the limit of {most}")
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if len(inside) > MOST_VALUES or depth > 8:
        raise ValueError(f"{key} has {len(inside)} values; the limit is {MOST_VALUES}, nested in at most 8 levels")
    for each in inside:
        _check_bounds(key, each, min(most, MOST_OPTION), depth + 1)
