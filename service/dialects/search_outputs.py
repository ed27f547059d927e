"""The outputs of an encoder that a request may ask for in one call, and the form of each in the answer: dense, sparse, multivector."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, StrictBool

from export import contract
from service.encoding import sparse, token_pooling, vectors
from service.encoding.model import Model
from service.encoding.request import RowOrError
from service.errors import InvalidRequest, ServiceError
from service.http.fields import Body, unsupported_fields
from service.runtime.onnx import Array
from service.runtime.steps import run_in_steps

AskedOutput = Literal["dense", "sparse", "multivector"]
MatrixType = Literal["float16", "float32", "int8", "binary", "ubinary"]
SPARSE_BYTES = 24.0  # bytes in JSON of an index with its weight
_MATRIX_BYTES: dict[MatrixType, float] = {"float16": 2, "float32": 4, "int8": 1, "binary": 1 / 8, "ubinary": 1 / 8}


PoolFactor = Annotated[
    float,
    Field(ge=1, le=1000, allow_inf_nan=False, description="Of a document, send 1 / pool_factor of the vectors: means of similar ones."),
]


class SparseOptions(Body):
    unsupported = unsupported_fields("dimensions")

    top_k: int | None = Field(None, ge=1, le=sparse.MOST_WEIGHTS, strict=True, description="Keep only so many weights, the largest.")
    min_weight: float = Field(0.0, ge=0, description="Keep only weights of at least this size.")
    return_tokens: StrictBool = Field(False, description="Add the token of each index.")


class MultiVectorOptions(Body):
    encoding_format: Literal["float", "base64"] = Field("base64", description="float: lists of numbers. base64: little-endian bytes.")
    dtype: MatrixType = Field(
        "float16", description="Type of a number. int8 scales each vector; binary and ubinary pack 8 signs in a byte."
    )
    dimensions: int | None = Field(
        None, ge=1, le=65_536, strict=True, description="Keep this many dimensions, then bring each vector back to length 1."
    )
    pool_factor: PoolFactor | None = None


class SparseObject(BaseModel):
    """A sparse vector: ascending indices, with weights above 0."""

    indices: list[int]
    values: list[float]
    tokens: list[str] | None = Field(None, description="With `return_tokens`: the token of each index.")


class MatrixObject(BaseModel):
    data: str = Field(description="Base64 of the numbers, row by row.")
    shape: list[int] = Field(min_length=2, max_length=2, description="The number of vectors, and the numbers (or packed bytes) of each.")
    dtype: MatrixType


def as_outputs(asked: Sequence[AskedOutput] | None, model: Model) -> Sequence[AskedOutput]:
    """Return the outputs that a request asks for, without any: the model's first."""
    first = model.manifest.outputs[0]
    assert first != "tokens", "every encoder has another output"
    return (first,) if asked is None else asked


def bytes_of(model: Model, matrices: MultiVectorOptions, *, arrow: bool = False) -> dict[str, float]:
    """Return the bytes that a number of a sparse vector and of a token matrix takes in the answer, by the graph's output."""
    if arrow:
        return {model.manifest.tensor_of("sparse"): 8.0, contract.MULTIVECTOR: 2.0}
    in_base64 = _MATRIX_BYTES[matrices.dtype] * 4 / 3
    in_lists = vectors.NUMBER_BYTES["float" if matrices.dtype in ("float16", "float32") else matrices.dtype]  # type: ignore[index]
    weights = model.manifest.tensor_of("sparse")
    return {weights: SPARSE_BYTES, contract.MULTIVECTOR: in_base64 if matrices.encoding_format == "base64" else in_lists}


def sparse_content(vector: sparse.Packed, options: SparseOptions, model: Model) -> dict[str, Any]:
    """Return the content of a `SparseObject`."""
    indices, values = sparse.unpacked(sparse.cut(vector, top_k=options.top_k, min_weight=options.min_weight))
    content: dict[str, Any] = {"indices": indices, "values": values}
    if options.return_tokens:
        content["tokens"] = tokens_of(model, indices)
    return content


def tokens_of(model: Model, indices: Any) -> list[str]:
    """Return the token of each index. Raises InvalidRequest if the model's indices are no tokens."""
    about = model.manifest.sparse
    if about is None or not about.vocabulary:
        raise InvalidRequest(f"the indices of model {model.name} are no tokens: ask without them", param="return_tokens")
    return [model.tokenizer.id_to_token(index) or "" for index in indices.tolist()]


async def pooled(rows: Sequence[RowOrError], at: int, factor: float, *, item_errors: bool) -> list[RowOrError]:
    """Return the rows with fewer vectors in the token matrix at `at` of each. Raises the error of a matrix that is too large, but if
    `item_errors`, it is the row."""

    def one(row: RowOrError) -> RowOrError:
        try:
            return row if isinstance(row, ServiceError) else (*row[:at], token_pooling.pool(row[at], factor), *row[at + 1 :])
        except ServiceError as error:
            if not item_errors:
                raise
            return error

    return await run_in_steps(map(one, rows))


def shortened(array: Array, options: MultiVectorOptions) -> Array:
    """Return a token matrix with the dimensions that a request keeps, in float32."""
    matrix: Array = array.astype(np.float32)
    vectors.check_dimensions(options.dimensions, matrix.shape[1], "multivector.dimensions")
    if options.dimensions is not None:
        matrix = np.stack([vectors.cut(row, options.dimensions, normalize=True) for row in matrix])
    return matrix


def matrix_content(array: Array, options: MultiVectorOptions) -> Any:
    """Return a token matrix as the content of a `MatrixObject`, or as a list of vectors."""
    matrix = shortened(array, options)
    if options.dtype in ("float16", "float32"):
        formed = matrix.astype(f"<f{4 if options.dtype == 'float32' else 2}")
    else:
        form: vectors.Form = options.dtype  # type: ignore[assignment]
        vectors.check_bits(form, matrix.shape[1])
        formed = np.stack([vectors.FORMS[form](row) for row in matrix])
    if options.encoding_format == "float":
        return list(formed.astype(np.float32) if formed.dtype == np.float16 else formed)
    return {"data": base64.b64encode(formed.tobytes()).decode(), "shape": formed.shape, "dtype": options.dtype}
