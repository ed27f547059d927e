"""Fields that clients of each dialect may send and this service does not use: the lists for rule 2 of `fields.py`.

Sources: the types of openai-python, cohere-python and huggingface_hub, and the request schemas of vLLM, text-embeddings-inference,
text-generation-inference, Jina, Cohere and Triton's extensions of the Open Inference Protocol.
"""

from service.http.fields import Other, Others, ignored

_ONE_TEXT = "no model here reads anything but text"
_NO_TEMPLATE = "the model's own chat template is used as it is"
_LANES = "requests are served in order; the header x-lane chooses between interactive and bulk"
_NOT_STORED = "nothing is stored by this service"
_WINDOW = "no input is cut unseen; shorten it"
_PREFIX_CACHE = "prompts are not kept from one request to the next"

# vLLM's extra parameters, on every route of its own --------------------------------------------------------------------------------------

_VLLM: Others = {
    "priority": Other(_LANES),
    "request_id": ignored("the header x-request-id names a request"),
    "mm_processor_kwargs": Other(_ONE_TEXT),
    "cache_salt": Other(_PREFIX_CACHE),
    "kv_transfer_params": Other("a state is not moved by requests"),
    "vllm_xargs": Other("there are no custom extensions"),
}
_SAMPLING: Others = {
    **_VLLM,
    "truncate_prompt_tokens": Other(_WINDOW),
    "use_beam_search": Other("decoders draw; encoder-decoders take `num_beams`"),
    "length_penalty": Other("no beam is ranked by it", accepts=(1,)),
    "spaces_between_special_tokens": ignored("tokens bring their own spaces"),
    "detokenize": Other("answers are text", accepts=(True,), empty=False),
    "bad_words": Other("use `logit_bias`"),
    "logits_processors": Other("no code is taken from requests"),
    "return_tokens_as_token_ids": Other("tokens are told as text"),
    "return_token_ids": Other("tokens are told as text; /tokenize gives ids"),
    "guided_decoding_backend": ignored("there is one"),
    "guided_whitespace_pattern": Other("white space is as the grammar allows it"),
    "structural_tag": Other("use `structured_outputs`"),
    "prompt_embeds": Other("prompts are text or token ids"),
    "repetition_detection": Other("nothing here looks for repetitions"),
    "echo": Other("only /v1/completions gives the prompt back"),
    "thinking_token_budget": Other("no model here reasons apart from its answer"),
}
_OPENAI: Others = {
    "prompt_cache_retention": ignored(_PREFIX_CACHE),
    "prompt_cache_options": ignored(_PREFIX_CACHE),
    "moderation": Other("nothing is moderated here"),
}
_OF_CHATS: Others = {
    "store": Other(_NOT_STORED),
    "service_tier": Other("there is one tier", accepts=("auto", "default")),
    "safety_identifier": ignored("nothing is moderated here"),
    "prompt_cache_key": ignored(_PREFIX_CACHE),
    "metadata": ignored(_NOT_STORED),
}

COMPLETIONS: Others = {
    **{name: other for name, other in _SAMPLING.items() if name != "echo"},
    **_OPENAI,
    **_OF_CHATS,
    "suffix": Other("no model here fills in the middle"),
    "add_special_tokens": Other(
        "the tokenizer's own are put before the prompt; send token ids to do without", accepts=(True,), empty=False
    ),
    "response_format": Other("use `structured_outputs`", accepts=({"type": "text"},)),
}
CHAT: Others = {
    **_SAMPLING,
    **_OPENAI,
    "best_of": Other("use `n`", accepts=(1,)),
    "reasoning_effort": Other("no model here reasons apart from its answer", accepts=("none",)),
    "include_reasoning": ignored("no model here reasons apart from its answer"),
    "verbosity": Other("it is one of low, medium and high, and none of them changes anything", accepts=("low", "medium", "high")),
    "prediction": ignored("it makes OpenAI faster and changes no answer"),
    "audio": Other(_ONE_TEXT),
    "web_search_options": Other("nothing is searched here", empty=False),
    "functions": Other("use `tools`"),
    "function_call": Other("use `tool_choice`", accepts=("none", "auto")),
    "chat_template": Other(_NO_TEMPLATE),
    "chat_template_kwargs": Other(_NO_TEMPLATE),
    "add_generation_prompt": Other(_NO_TEMPLATE, accepts=(True,), empty=False),
    "continue_final_message": Other(_NO_TEMPLATE),
    "add_special_tokens": Other("the chat template writes them"),
    "documents": Other(_NO_TEMPLATE),
    "suffix": Other("a message has no suffix"),
}
MESSAGE: Others = {
    "audio": Other(_ONE_TEXT),
    "function_call": Other("use `tool_calls`"),
    "annotations": ignored("they belong to an answer that was sent back"),
    "reasoning": Other("no model here reasons apart from its answer"),
    "reasoning_content": Other("no model here reasons apart from its answer"),
}
RESPONSES: Others = {
    **_SAMPLING,
    **_OPENAI,
    "reasoning": Other("no model here reasons apart from its answer", accepts=({"effort": "none"},)),
    "conversation": Other("answers are not stored by this service; send the conversation as `input`"),
    "prompt": Other("no prompts are stored by this service"),
    "max_tool_calls": ignored("no tool is called here"),
    "context_management": Other(_WINDOW),
    "background_options": Other("answers are not made in the background"),
    "image": Other(_ONE_TEXT),
    "access_programs": Other("there are none"),
    "prompt_logprobs": Other("only /v1/completions and /v1/chat/completions tell them"),
    "n": Other("a response is one answer; /v1/chat/completions takes `n`", accepts=(1,)),
}
IMAGES: Others = {
    "moderation": Other("nothing is moderated here", accepts=("auto", "low")),
    "style": Other("a model has one style"),
    "output_compression": Other("a PNG loses nothing", accepts=(100,)),
    "frame_count": Other("a picture has one frame", accepts=(1,)),
    "frame_duration_ms": Other("a picture has one frame"),
    "complexity": Other("a picture is as the model draws it"),
    "svg": Other("pictures are PNG files"),
    "input_fidelity": Other("no picture is read"),
}

# Vectors and scores ----------------------------------------------------------------------------------------------------------------------

_NO_ROLES = "use `prompt_name` or `prompt`"
_NO_CHUNKS = "a text gives one vector"
EMBEDDINGS: Others = {
    **_VLLM,
    "messages": Other("send the text as `input`", empty=False),
    "additional_data": ignored("plugins read it, and there are none"),
    "add_special_tokens": Other("models are fed what they were trained on; send token ids to do without", accepts=(True,), empty=False),
    "embed_dtype": Other("`encoding_format` has int8, uint8, binary and ubinary", accepts=("float32",)),
    "endianness": Other("base64 is little-endian", accepts=("native", "little")),
    "chat_template": Other("the text is read as it is"),
    "chat_template_kwargs": Other("the text is read as it is"),
    "continue_final_message": Other("the text is read as it is"),
    "add_generation_prompt": Other("the text is read as it is"),
    "use_activation": Other("use `normalize`", accepts=(True,), empty=False),
    "task": Other(_NO_ROLES),
    "input_type": Other(_NO_ROLES),
    "late_chunking": Other(_NO_CHUNKS),
    "return_multivector": Other(_NO_CHUNKS),
    "embedding_type": Other("use `encoding_format`", accepts=("float",)),
    "normalized": Other("use `normalize`", accepts=(True,), empty=False),
    "output_dimension": Other("use `dimensions`"),
    "output_dtype": Other("use `encoding_format`", accepts=("float",)),
    "truncation": Other("use `truncate`", accepts=(True,), empty=False),
    "modality": Other(_ONE_TEXT, accepts=("text",)),
}
TEI_PREDICT: Others = {
    "options": ignored("they are for a hosted service that loads models on demand"),
    "stream": Other("send `Accept: application/x-ndjson` to /embed"),
}
TEI: Others = {**TEI_PREDICT, "parameters": Other("this route takes its fields beside its inputs")}
TEI_EMBED: Others = {**TEI, "encoding_format": Other("numbers are sent; /v1/embeddings knows other forms", accepts=("float",))}
TEI_EMBED_ALL: Others = {
    **TEI_EMBED,
    "normalize": Other("the vectors of tokens are not normalised"),
    "dimensions": Other("the vectors of tokens are not shortened"),
}
TEI_RERANK: Others = {**TEI, "top_n": Other("all texts are answered; the route's other form, with `documents`, takes `top_n`")}
PIPELINE: Others = {
    "truncation": Other("use `truncate`", accepts=(True,), empty=False),
    "max_length": Other("use `truncate`"),
}
COHERE_EMBED: Others = {"embedding_type": Other("use `embedding_types`", accepts=("float",)), "dimensions": Other("use `output_dimension`")}
COHERE_RERANK: Others = {
    "relevant_spans": Other("scores belong to whole documents"),
    "rank_fields": Other("a document is its `text`", accepts=(["text"],)),
    "max_chunks_per_doc": Other("a document is read in one piece", accepts=(1, 10)),
}
JINA: Others = {
    **_VLLM,
    **COHERE_RERANK,
    "additional_data": ignored("plugins read it, and there are none"),
    "user": ignored("requests are not told apart by it"),
    "truncate_prompt_tokens": Other("documents are cut to the model's length"),
    "truncate": Other("documents are cut to the model's length", accepts=(True,), empty=False),
    "truncation": Other("documents are cut to the model's length", accepts=(True,), empty=False),
    "max_doc_length": Other("documents are cut to the model's length"),
    "max_query_length": Other("the query is cut to the model's length"),
    "max_tokens_per_doc": Other("documents are cut to the model's length; /v2/rerank takes it", accepts=(4096,)),
    "return_embeddings": Other("/v1/embeddings gives vectors"),
    "use_activation": Other("use `raw_scores`", accepts=(True,), empty=False),
    "activation": Other("use `raw_scores`", accepts=(True,), empty=False),
    "chat_template": Other("the texts are read as they are"),
    "chat_template_kwargs": Other("the texts are read as they are"),
}
TOKENIZE: Others = {
    "continue_final_message": Other(_NO_TEMPLATE),
    "chat_template": Other(_NO_TEMPLATE),
    "chat_template_kwargs": Other(_NO_TEMPLATE),
    "mm_processor_kwargs": Other(_ONE_TEXT),
    "tools": Other("tools are shown to the model by /v1/chat/completions"),
}

# Open Inference Protocol, with Triton's extensions ---------------------------------------------------------------------------------------

_NO_SEQUENCES = "requests do not belong to sequences"
OIP_REQUEST: Others = {
    "sequence_id": Other(_NO_SEQUENCES),
    "sequence_start": Other(_NO_SEQUENCES),
    "sequence_end": Other(_NO_SEQUENCES),
    "priority": Other(_LANES),
    "timeout": Other("the header x-request-timeout-ms sets a deadline"),
}
_NO_SHARED_MEMORY: Others = {
    "shared_memory_region": Other("tensors come and go in bodies"),
    "shared_memory_offset": Other("tensors come and go in bodies"),
    "shared_memory_byte_size": Other("tensors come and go in bodies"),
}
OIP_INPUT: Others = {**_NO_SHARED_MEMORY, "content_type": ignored("the datatype says what the data is")}
OIP_OUTPUT: Others = {**_NO_SHARED_MEMORY, "classification": Other("/predict sorts labels by their scores")}

# text-generation-inference ---------------------------------------------------------------------------------------------------------------

TGI: Others = {
    "adapter_id": Other("there are no adapters; a model of its own is chosen by name"),
    "best_of": Other("a prompt has one continuation", accepts=(1,)),
    "watermark": Other("texts bear no watermark"),
}
