"""The contradictions between fields of a manifest. With any of them, a server could start but not answer requests."""

from collections.abc import Iterator

from export.contract.interfaces import Interface, decoder_interface, encoder_interface, packed_interface, step_interface
from export.contract.manifest import Manifest, ShortGraph
from export.contract.names import GOLDEN, MANIFEST, TOKEN_EMBEDDINGS, TOKEN_TYPE_IDS, TOKENIZER
from export.contract.tensors import MOST_STATE_BYTES, Tensor


def contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions, in words."""
    decoder, traits = manifest.decoder, manifest.traits
    for name, part in (("decoder", decoder), ("encoder_decoder", manifest.encoder_decoder)):
        if (part is not None) != (traits.part == name):
            yield f"kind is {manifest.kind} and `{name}` is {'absent' if part is None else 'there'}"
            return
    yield from _contradictions_of_files(manifest)
    yield from _contradictions_of_tokens(manifest)
    for way, wanted in _interface(manifest)._asdict().items():
        if (found := getattr(manifest.graph, way)) != wanted:
            yield f"the graph of this kind has the {way} {_shapes(wanted)}, and graph.{way} are {_shapes(found)}"
    if manifest.short_graph is not None:
        yield from _contradictions_of_short_texts(manifest, manifest.short_graph)
    if manifest.gpu_graph is not None and decoder is None:  # earlier releases wrote one for decoders too, which is not used
        typed = any(tensor.name == TOKEN_TYPE_IDS for tensor in manifest.graph.inputs)
        for way, wanted in packed_interface(manifest.kind, manifest.width, typed=typed)._asdict().items():
            if (found := getattr(manifest.gpu_graph.graph, way)) != wanted:
                yield f"the graph for GPUs has the {way} {_shapes(wanted)}, and gpu_graph.graph.{way} are {_shapes(found)}"
        if manifest.gpu_graph.pooling is None:
            yield f"kind is {manifest.kind} and gpu_graph.pooling is absent"
    labels = manifest.id2label
    if traits.has_labels and (len(labels) != manifest.width or set(labels) != set(range(len(labels)))):
        yield f"width is {manifest.width} and id2label names {len(labels)} labels, where each of 0 to {manifest.width - 1} needs one"
    if traits.ranks and manifest.width != 1:
        yield f"a {manifest.kind} has one label, and width is {manifest.width}"
    if manifest.traits.gives_vectors and manifest.outputs == ("tokens",):
        yield "pooling is none, and neither sparse nor multivector is there: the encoder gives nothing of a text"
    for role, written in (manifest.roles or {}).items():
        if written.prompt is not None and written.prompt not in manifest.prompts:
            yield f"roles.{role}.prompt={written.prompt!r:.80} is not one of the prompts"
    if manifest.default_prompt is not None and manifest.default_prompt not in manifest.prompts:
        yield f"default_prompt={manifest.default_prompt!r:.80} is not one of the prompts"
    if decoder is not None and decoder.state_bytes > MOST_STATE_BYTES:
        yield f"a sequence has a state of {decoder.state_bytes} bytes, and {MOST_STATE_BYTES} are the most"


def _contradictions_of_short_texts(manifest: Manifest, short: ShortGraph) -> Iterator[str]:
    if manifest.traits.pool != "encoder" or manifest.gpu_graph is not None:
        yield f"short_graph is for an encoder without a graph for GPUs, and kind is {manifest.kind}"
    for way in Interface._fields:
        if (found := getattr(short.graph, way)) != (wanted := getattr(manifest.graph, way)):
            yield f"both graphs need the {way} {_shapes(wanted)}, and short_graph.graph.{way} are {_shapes(found)}"
    if short.max_tokens >= (longest := manifest.limits.max_tokens):
        yield f"short_graph.max_tokens={short.max_tokens} must be below limits.max_tokens={longest}"
    if (maps := manifest.attention_graph) is not None and maps.max_tokens > short.max_tokens:
        yield f"attention_graph.max_tokens={maps.max_tokens} exceeds short_graph.max_tokens={short.max_tokens}, which it is of"


def _contradictions_of_files(manifest: Manifest) -> Iterator[str]:
    decoder, both, maps = manifest.decoder, manifest.encoder_decoder, manifest.attention_graph
    names = [file.name for file in manifest.files]
    needed = [manifest.graph.file, TOKENIZER, GOLDEN]
    needed += [both.reader.file] if both is not None else []
    needed += [maps.file] if maps is not None else []
    needed += [manifest.short_graph.graph.file] if manifest.short_graph is not None else []
    needed += [manifest.gpu_graph.graph.file] if manifest.gpu_graph is not None else []
    needed += [manifest.sparse.query_table] if manifest.sparse is not None and manifest.sparse.query_table is not None else []
    needed += [decoder.chat_template] if decoder is not None and decoder.chat_template is not None else []
    if missing := [name for name in needed if name not in names]:
        yield f"files does not list {missing[0]}, which would be served unchecked"
    if len(set(names)) < len(names) or MANIFEST in names:
        yield f"files lists {MANIFEST if MANIFEST in names else next(name for name in names if names.count(name) > 1)}, or a name twice"


def _contradictions_of_tokens(manifest: Manifest) -> Iterator[str]:
    decoder, both, vocab_size = manifest.decoder, manifest.encoder_decoder, manifest.limits.vocab_size
    ids = {"pad_token_id": manifest.pad_token_id}
    if decoder is not None:
        ids |= {f"eos_token_ids.{at}": token for at, token in enumerate(decoder.eos_token_ids)}
        ids |= {} if decoder.bos_token_id is None else {"bos_token_id": decoder.bos_token_id}
        levels = () if decoder.image is None else decoder.image.level_token_ids
        ids |= {f"level_token_ids.{at}": token for at, token in enumerate(levels)}
        if len(set(levels)) < len(levels):
            yield "level_token_ids has a token twice"
    if both is not None:
        ids |= {"begin_token_id": both.begin_token_id, "end_token_id": both.end_token_id}
    if manifest.sparse is not None:
        ids |= {f"sparse.ignored_ids.{at}": token for at, token in enumerate(manifest.sparse.ignored_ids)}
    if manifest.multivector is not None:
        ids |= {f"multivector.skipped_ids.{at}": token for at, token in enumerate(manifest.multivector.skipped_ids)}
    for role, written in (manifest.roles or {}).items():
        ids |= {} if written.marker_id is None else {f"roles.{role}.marker_id": written.marker_id}
        ids |= {} if written.expansion is None else {f"roles.{role}.expansion.token_id": written.expansion.token_id}
    for name, token in ids.items():
        if token >= vocab_size:
            yield f"{name}={token} is not in the vocabulary, 0 to {vocab_size - 1}"


def _interface(manifest: Manifest) -> Interface:
    """Return the inputs and outputs that the served graph must have; for an encoder-decoder, those of the step graph."""
    decoder, both, graph, vocab_size = manifest.decoder, manifest.encoder_decoder, manifest.graph, manifest.limits.vocab_size
    if decoder is not None:
        return decoder_interface(decoder.states, vocab_size, takes_positions=decoder.takes_positions)
    if both is not None:
        return step_interface(both.reader.outputs, vocab_size)
    d_model = next((tensor.shape[-1] for tensor in graph.outputs if tensor.name == TOKEN_EMBEDDINGS and tensor.shape), "D")
    return encoder_interface(
        manifest.kind,
        manifest.width,
        d_model,
        typed=any(tensor.name == TOKEN_TYPE_IDS for tensor in graph.inputs),
        dense="dense" in manifest.outputs,
        sparse=manifest.sparse,
        multivector=manifest.multivector,
    )


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    told = [f"{tensor.name} ({', '.join(map(str, tensor.shape))})" for tensor in tensors[:6]]
    return ", ".join(told)[:300] + (", .." if len(tensors) > 6 else "") or "none"
