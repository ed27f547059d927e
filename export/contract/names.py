"""The names of a bundle's files and of its graphs' tensors."""

MANIFEST = "manifest.json"
GRAPH = "model.onnx"
TOKENIZER = "tokenizer.json"
GOLDEN = "golden.json"
ATTENTION_GRAPH = "attention.onnx"
SHORT_GRAPH = "short.onnx"

# Tensor names of the graphs of encoders, rerankers and classifiers. B is the number of texts in a batch, N their padded length in tokens,
# D the width of a vector and L the number of labels.
INPUT_IDS = "input_ids"  # (B, N) int64
ATTENTION_MASK = "attention_mask"  # (B, N) int64, 1 = token, 0 = padding, 2 = token to which no token attends
TOKEN_TYPE_IDS = "token_type_ids"  # (B, N) int64, 1 = second text; only if the model reads pairs of texts and has token types
EMBEDDING = "sentence_embedding"  # (B, D) float32, unit length
POOLED = "pooled"  # (B, D) float32, EMBEDDING before normalisation
TOKEN_EMBEDDINGS = "token_embeddings"  # (B, N, D_model) float32, 0 at padding
SPARSE = "sparse"  # (B, V) float32, none below 0; V is `Sparse.size`
TOKEN_WEIGHTS = "token_weights"  # (B, N) float32, none below 0, 0 at padding; only if `Sparse.by_token`, in place of SPARSE
MULTIVECTOR = "multivector"  # (B, N, `MultiVector.width`) float32, unit length, 0 at padding
LOGITS = "logits"  # (B, L) float32; (B, N, L) in a token classifier

# Tensor names of every decoder's step graph, used for both prefill and decode. M is the number of positions whose logits are requested, V
# the size of the vocabulary. A row's tokens are padded on the right, and padding leaves the row's state unchanged.
TOKENS = "tokens"  # (B, N) int64
LENGTHS = "lengths"  # (B,) int64, number of tokens of each row in this call, 0 to N
POSITIONS = "positions"  # (B,) int64, number of tokens of each row before this call; an input only if `Decoder.takes_positions`
WANTED = "wanted"  # (B, M) int64, the positions in this call whose logits are requested
STEP_LOGITS = "logits"  # (B, M, V) float32
# The input `state_LAYER_NAME` of each state tensor has the output `new_state_LAYER_NAME`; see `StateTensor`.

# Tensor names of the optional graph for GPUs of an encoder, reranker or classifier. The host packs the tokens of a batch: T is their number
# with padding at the end, E = B + 1, N the longest text in tokens. All sizes depend on the inputs' shapes only. Attention is the operator
# PackedMultiHeadAttention, which defines TOKEN_OFFSET and CU_SEQLENS.
GPU_GRAPH = "gpu.onnx"
POSITION_IDS = "position_ids"  # (T,) int32, the place of a token in its text; INPUT_IDS and TOKEN_TYPE_IDS are (T,) int32 too
TEXT_OF_TOKEN = "text_of_token"  # (T,) int32, the text whose vector the token contributes to; -1 = none, e.g. padding
POOLING_WEIGHT = "pooling_weight"  # (T,) float32, the token's weight in that vector
TEXTS = "texts"  # (B, 1) int32, the numbers 0 .. B - 1
TOKEN_OFFSET = "token_offset"  # (B, N) int32, the place of each packed token among B * N padded ones, then the places of padding
CU_SEQLENS = "cu_seqlens"  # (B + 1,) int32, the number of tokens in all texts before each text, and in all texts

# An encoder-decoder has two graphs. The reader maps INPUT_IDS and ATTENTION_MASK (B, N) to tensors `memory_*` (B, N, ..) and `state_*`
# (B, ..). The step graph maps PREVIOUS, ATTENTION_MASK, memory and state to logits (B, V), ATTENTION and `new_state_*`.
READER = "reader.onnx"
PREVIOUS = "previous"  # (B,) int64, the last generated token
ATTENTION = "attention"  # (B, N) float32, the attention over the source tokens; sums to 1

# The optional attention graph maps `input_ids` (1, N) of one text to one matrix (H, N, N) per layer, [head, query, key].
LONGEST_ATTENTION = 256  # longest text in tokens; there is a limit because each layer returns H N² numbers
