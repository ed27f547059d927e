"""Makes a graph for GPUs computable on a CPU: the operators that have only a CUDA kernel become functions of ordinary operators."""

import shutil
from pathlib import Path

import onnx
from onnx import parser

from export.graphs.onnx_file import weight_file

TWIN = "attnserve.twin"  # the domain of the functions

# com.microsoft.PackedMultiHeadAttention: q, k, v (T, H D_k) -> (T, H D_k). A token attends to the tokens of its own text, by cu_seqlens.
# The output of tokens after the last text is 0 here; the operator leaves it undefined.
PACKED_ATTENTION = """
<domain: "attnserve.twin", opset_import: ["": 20]>
PackedMultiHeadAttention <num_heads, scale>(query, key, value, bias, token_offset, cu_seqlens) => (output) {
    zero = Constant <value_int: int = 0>()
    one = Constant <value_int: int = 1>()
    ones = Constant <value_ints: ints = [1]>()
    most = Constant <value_ints: ints = [9223372036854775807]>()
    shape = Shape(query)
    T = Gather(shape, zero)
    at = Range(zero, T, one)
    at_T1 = Unsqueeze(at, ones)
    ends = Slice(cu_seqlens, ones, most)
    ends_64 = Cast<to = 7>(ends)
    ended = GreaterOrEqual(at_T1, ends_64)
    counted = Cast<to = 7>(ended)
    text = ReduceSum<keepdims = 0>(counted, ones)
    text_T1 = Unsqueeze(text, ones)
    same = Equal(text_T1, text)
    heads = Constant <value_int: int = @num_heads>()
    heads_1 = Unsqueeze(heads, zero)
    zero_1 = Unsqueeze(zero, zero)
    rest = Constant <value_ints: ints = [-1]>()
    split = Concat<axis = 0>(zero_1, heads_1, rest)
    merged = Concat<axis = 0>(zero_1, rest)
    query_32 = Cast<to = 1>(query)
    key_32 = Cast<to = 1>(key)
    texts = Size(ends)
    in_text = Less(text_T1, texts)
    nothing = Constant <value_float: float = 0.0>()
    any_value = Cast<to = 1>(value)
    value_32 = Where(in_text, any_value, nothing)
    query_THD = Reshape(query_32, split)
    key_THD = Reshape(key_32, split)
    value_THD = Reshape(value_32, split)
    q = Transpose<perm = [1, 0, 2]>(query_THD)
    k = Transpose<perm = [1, 2, 0]>(key_THD)
    v = Transpose<perm = [1, 0, 2]>(value_THD)
    products = MatMul(q, k)
    factor = Constant <value_float: float = @scale>()
    scores = Mul(products, factor)
    never = Constant <value_float: float = -3.4e38>()
    masked = Where(same, scores, never)
    p = Softmax<axis = -1>(masked)
    o_HTD = MatMul(p, v)
    o_THD = Transpose<perm = [1, 0, 2]>(o_HTD)
    o = Reshape(o_THD, merged)
    output = CastLike(o, query)
}
"""


def write_cpu_twin(file: Path, twin: Path) -> None:
    """Write the graph `file` as a graph for CPUs. In another folder it gets a copy of the weights."""
    model = onnx.load(file, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "PackedMultiHeadAttention":
            node.domain = TWIN
    model.functions.append(parser.parse_function(PACKED_ATTENTION))
    model.opset_import.append(onnx.helper.make_opsetid(TWIN, 1))
    onnx.save(model, twin)
    if twin.parent != file.parent:
        shutil.copyfile(weight_file(file), twin.parent / weight_file(file).name)
