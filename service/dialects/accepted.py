"""Lists the fields that clients of each dialect may send but that this service does not use.

Values of such a field that have no effect are accepted, such as null, 0 or "". Other values are refused with the reason given here.
`http/fields.py` applies these rules, and has an exception: an `ignored` field accepts any value.

Sources: the types of openai-python, cohere-python and huggingface_hub, and the request schemas of vLLM,
text-embeddings-inference, text-generation-inference, Jina, Cohere and Triton's extensions of the Open Inference Protocol.
"""

from service.http.fields import Other, Others, ignored


def _all(other: Other, *names: str) -> Others:
    """Return a mapping from each of the field `names` to the same entry `other`."""
    return dict.fromkeys(names, other)


_TEXT_ONLY = Other("models read text only")
_NO_TEMPLATE = Other("the chat template of the model cannot be changed")
_PLAIN_TEXT = Other("no chat template is applied to the texts")
_LANES = Other("requests are served in order; the header x-lane selects interactive or bulk")
_NOT_STORED = "this service stores nothing"
_NO_TRUNCATION = Other("prompts are never truncated; send a shorter one")
_OWN_CACHE = "all prompts are cached, those of a tenant apart; `cache_salt` divides them further"
_NO_REASONING = "models write no separate reasoning"
_NO_MODERATION = "content is not moderated"
_BY_MODEL_LENGTH = "documents are truncated to the model's limit"
_NO_PLUGINS = ignored("only plugins read it, and there are none")

# vLLM's extra parameters, which each of its routes has ------------------------------------------------------------------------------------

_VLLM: Others = {
    "priority": _LANES,
    "request_id": ignored("the header x-request-id sets the id of a request"),
    "mm_processor_kwargs": _TEXT_ONLY,
    "cache_salt": Other("vectors are cached by text, for all requests of a tenant"),
    "kv_transfer_params": Other("requests cannot transfer the state of a model"),
    "vllm_xargs": Other("there are no custom extensions"),
}
_SAMPLING: Others = {
    **{name: other for name, other in _VLLM.items() if name != "cache_salt"},
    "truncate_prompt_tokens": _NO_TRUNCATION,
    "use_beam_search": Other("decoders sample; encoder-decoders have beam search with `num_beams`"),
    "length_penalty": Other("beams are not ranked by length", accepts=(1,)),
    "spaces_between_special_tokens": ignored("no spaces are inserted between tokens"),
    "detokenize": Other("answers are always text", accepts=(True,), empty=False),
    "bad_words": Other("use `logit_bias`"),
    "logits_processors": Other("requests cannot contain code"),
    "return_tokens_as_token_ids": Other("tokens are sent as text"),
    "return_token_ids": Other("tokens are sent as text; /tokenize gives ids"),
    "guided_decoding_backend": ignored("there is only one backend"),
    "guided_whitespace_pattern": Other("the grammar defines the white space"),
    "structural_tag": Other("use `structured_outputs`"),
    "prompt_embeds": Other("prompts are text or token ids"),
    "repetition_detection": Other("repetitions are not detected"),
    "echo": Other("only /v1/completions can repeat the prompt"),
    "thinking_token_budget": Other(_NO_REASONING),
}
_OPENAI: Others = {
    **_all(ignored(_OWN_CACHE), "prompt_cache_retention", "prompt_cache_options"),
    "moderation": Other(_NO_MODERATION),
}
COMPLETIONS: Others = {
    **{name: other for name, other in _SAMPLING.items() if name != "echo"},
    **_OPENAI,
    "store": Other(_NOT_STORED),
    "service_tier": Other("there is only one tier", accepts=("auto", "default")),
    "safety_identifier": ignored(_NO_MODERATION),
    "prompt_cache_key": ignored(_OWN_CACHE),
    "metadata": ignored(_NOT_STORED),
    "suffix": Other("no model here fills in the middle"),
    "add_special_tokens": Other(
        "the tokenizer adds its special tokens to texts; send token ids to avoid that", accepts=(True,), empty=False
    ),
    "response_format": Other("use `structured_outputs`", accepts=({"type": "text"},)),
}
CHAT: Others = {
    **_SAMPLING,
    **_OPENAI,
    "best_of": Other("use `n`", accepts=(1,)),
    "reasoning_effort": Other(_NO_REASONING, accepts=("none",)),
    "include_reasoning": ignored(_NO_REASONING),
    "verbosity": Other("only low, medium and high are accepted; none of them has an effect", accepts=("low", "medium", "high")),
    "prediction": ignored("it changes only the speed of OpenAI's service, not the answer"),
    "audio": _TEXT_ONLY,
    "web_search_options": Other("there is no web search", empty=False),
    "functions": Other("use `tools`"),
    "function_call": Other("use `tool_choice`", accepts=("none", "auto")),
    **_all(_NO_TEMPLATE, "chat_template", "chat_template_kwargs"),
    "add_generation_prompt": Other(_NO_TEMPLATE.because, accepts=(True,), empty=False),
    "continue_final_message": _NO_TEMPLATE,
    "add_special_tokens": Other("the chat template writes the special tokens"),
    "documents": _NO_TEMPLATE,
    "suffix": Other("messages have no suffix"),
}
PART: Others = {"cache_control": ignored(_OWN_CACHE)}
MESSAGE: Others = {
    **PART,
    "audio": _TEXT_ONLY,
    "function_call": Other("use `tool_calls`"),
    "annotations": ignored("only answers have annotations"),
    "reasoning": Other("an earlier message's reasoning is `reasoning_content`"),
}
RESPONSES: Others = {
    **_SAMPLING,
    **_OPENAI,
    "reasoning": Other(_NO_REASONING, accepts=({"effort": "none"},)),
    "prompt": Other("this service does not store prompts"),
    "max_tool_calls": ignored("this service executes no tools"),
    "context_management": _NO_TRUNCATION,
    "background_options": Other("a background response has no options"),
    "image": _TEXT_ONLY,
    "access_programs": Other("there are no access programs"),
    "prompt_logprobs": Other("only /v1/completions and /v1/chat/completions have them"),
    "n": Other("there is one answer per request; /v1/chat/completions takes `n`", accepts=(1,)),
}
IMAGES: Others = {
    "moderation": Other(_NO_MODERATION, accepts=("auto", "low")),
    "style": Other("a model has one style"),
    "output_compression": Other("PNG compression is lossless", accepts=(100,)),
    "frame_count": Other("pictures have one frame", accepts=(1,)),
    "frame_duration_ms": Other("pictures have one frame"),
    "complexity": Other("the model alone decides about the picture"),
    "svg": Other("pictures are PNG files"),
    "input_fidelity": Other("the input is text only"),
}

# Vectors and scores ----------------------------------------------------------------------------------------------------------------------

EMBEDDINGS: Others = {
    **_VLLM,
    "messages": Other("send the text as `input`", empty=False),
    "additional_data": _NO_PLUGINS,
    "add_special_tokens": Other("special tokens are added as in training; send token ids to avoid that", accepts=(True,), empty=False),
    "embed_dtype": Other("`encoding_format` has int8, uint8, binary and ubinary", accepts=("float32",)),
    "endianness": Other("base64 is little-endian", accepts=("native", "little")),
    **_all(_PLAIN_TEXT, "chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
    "use_activation": Other("use `normalize`", accepts=(True,), empty=False),
    **_all(Other("use `prompt_name` or `prompt`"), "task", "input_type"),
    **_all(Other("there is one vector per text"), "late_chunking", "return_multivector"),
    "embedding_type": Other("use `encoding_format`", accepts=("float",)),
    "normalized": Other("use `normalize`", accepts=(True,), empty=False),
    "output_dimension": Other("use `dimensions`"),
    "output_dtype": Other("use `encoding_format`", accepts=("float",)),
    "truncation": Other("use `truncate`", accepts=(True,), empty=False),
    "modality": Other(_TEXT_ONLY.because, accepts=("text",)),
}
TEI_PREDICT: Others = {
    "options": ignored("they concern a hosted service that loads models on demand"),
    "stream": Other("send `Accept: application/x-ndjson` to /embed"),
}
TEI: Others = {**TEI_PREDICT, "parameters": Other("the fields of this route are beside `inputs`, not inside `parameters`")}
TEI_EMBED: Others = {**TEI, "encoding_format": Other("vectors are lists of numbers; /v1/embeddings has other formats", accepts=("float",))}
TEI_EMBED_ALL: Others = {
    **TEI_EMBED,
    "normalize": Other("vectors of tokens are not normalised"),
    "dimensions": Other("vectors of tokens are not truncated"),
}
# Parameters of huggingface_hub's tasks with labels that no model here has.
LABELS: Others = {
    **_all(
        Other("/predict gives the labels of a classifier; /rerank scores texts, such as labels, for a query"),
        *("candidate_labels", "hypothesis_template", "multi_label"),
    ),
    **_all(Other("/predict gives the labels of a whole text"), "aggregation_strategy", "ignore_labels", "stride"),
}
PIPELINE: Others = {
    **LABELS,
    "truncation": Other("use `truncate`", accepts=(True,), empty=False),
    "max_length": Other("use `truncate`"),
}
COHERE_EMBED: Others = {"embedding_type": Other("use `embedding_types`", accepts=("float",)), "dimensions": Other("use `output_dimension`")}
COHERE_RERANK: Others = {
    "relevant_spans": Other("there is one score per document"),
    "rank_fields": Other("only the `text` of a document is read", accepts=(["text"],)),
    "max_chunks_per_doc": Other("documents are not split", accepts=(1, 10)),
}
JINA: Others = {
    **_VLLM,
    **COHERE_RERANK,
    "additional_data": _NO_PLUGINS,
    "user": ignored("requests are identified by their API key"),
    "max_tokens_per_doc": Other(f"{_BY_MODEL_LENGTH}; /v2/rerank takes it", accepts=(4096,)),
    **_all(Other(_BY_MODEL_LENGTH), "truncate_prompt_tokens", "max_doc_length"),
    **_all(Other(_BY_MODEL_LENGTH, accepts=(True,), empty=False), "truncate", "truncation"),
    "max_query_length": Other("the query is truncated to the model's limit"),
    "return_embeddings": Other("/v1/embeddings gives vectors"),
    **_all(Other("use `raw_scores`", accepts=(True,), empty=False), "use_activation", "activation"),
    **_all(_PLAIN_TEXT, "chat_template", "chat_template_kwargs"),
}
TOKENIZE: Others = {
    **_all(_NO_TEMPLATE, "continue_final_message", "chat_template", "chat_template_kwargs"),
    "mm_processor_kwargs": _TEXT_ONLY,
    "tools": Other("only /v1/chat/completions gives tools to the model"),
}

# Open Inference Protocol, with Triton's extensions ---------------------------------------------------------------------------------------

OIP_REQUEST: Others = {
    **_all(Other("there are no sequences of requests"), "sequence_id", "sequence_start", "sequence_end"),
    "priority": _LANES,
    "timeout": Other("the header x-request-timeout-ms sets a deadline"),
}
_NO_SHARED_MEMORY = _all(
    Other("tensors are sent only in bodies"), "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
)
OIP_INPUT: Others = {**_NO_SHARED_MEMORY, "content_type": ignored("the datatype defines the content")}
OIP_OUTPUT: Others = {**_NO_SHARED_MEMORY, "classification": Other("/predict sorts labels by their scores")}

# text-generation-inference ---------------------------------------------------------------------------------------------------------------

TGI: Others = {
    "adapter_id": Other("there are no adapters; a fine-tuned model has a name of its own"),
    "best_of": Other("there is one completion per prompt", accepts=(1,)),
    "watermark": Other("texts are not watermarked"),
}
