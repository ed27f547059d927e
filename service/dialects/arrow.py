"""An answer as an Arrow table, a row for each input: for pandas, Polars, DuckDB, LanceDB and Parquet without a step of JSON.

Columns: `index`; of the asked outputs `embedding` (fixed_size_list<float>), `sparse` (struct<indices: list<int32>, values: list<float>>)
and `multivector` (list<fixed_size_list<halffloat>>); and `error`, null unless the request asked for errors by item and this input has one.
Its vectors are null then. The schema's metadata has the model, the space of each output and the number of tokens.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Response

from service.call import ARROW, Call
from service.dialects.search_outputs import AskedOutput
from service.encoding import sparse
from service.encoding.request import Row
from service.errors import InvalidRequest, PackageMissing, ServiceError


def check_formats(call: Call, encoding_format: str, dtype: str, *, chunks: bool) -> None:
    """Raise InvalidRequest if the request asks for what a table has not."""
    if encoding_format not in ("float", "base64") or dtype != "float16" or chunks or call.ndjson:
        raise InvalidRequest(
            "an Arrow table has `embedding` in float32 and `multivector` in float16, and no chunks or lines: leave these wishes out, or "
            f"{ARROW} of the header accept",
            param="accept",
        )


async def table_answer(
    rows: Sequence[Row | ServiceError], outputs: Sequence[AskedOutput], metadata: dict[str, str], call: Call
) -> Response:
    """Return the table of the rows, whose arrays are already those to send. Raises PackageMissing without pyarrow."""
    content = await asyncio.to_thread(_stream, rows, outputs, metadata)
    return Response(content, headers=call.headers, media_type=ARROW)


def load_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise PackageMissing(
            f"{ARROW} needs the Python package pyarrow on the server: install attnserve[arrow], or accept application/json", param="accept"
        ) from None
    return pyarrow


def _stream(rows: Sequence[Row | ServiceError], outputs: Sequence[AskedOutput], metadata: dict[str, str]) -> bytes:
    pa = load_pyarrow()
    failed = np.array([isinstance(row, ServiceError) for row in rows])
    columns = {"index": pa.array(np.arange(len(rows), dtype=np.int32))}
    for at, output in enumerate(outputs):
        arrays = [None if isinstance(row, ServiceError) else row[at] for row in rows]
        columns["embedding" if output == "dense" else output] = _COLUMNS[output](pa, arrays, failed)
    columns["error"] = pa.array([row.message if isinstance(row, ServiceError) else None for row in rows], pa.string())
    table = pa.table(columns).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _dense(pa: Any, arrays: Sequence[Any], failed: Any) -> Any:
    width = next((len(array) for array in arrays if array is not None), 0)
    flat = np.concatenate([np.zeros(width, np.float32) if array is None else array for array in arrays]).astype(np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), width, mask=pa.array(failed))


def _sparse(pa: Any, arrays: Sequence[Any], failed: Any) -> Any:
    parts = [(np.zeros(0, np.int32), np.zeros(0, np.float32)) if array is None else sparse.unpacked(array) for array in arrays]
    offsets = _offsets([len(indices) for indices, _ in parts])
    lists = [pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(each))) for each in zip(*parts, strict=True)]
    return pa.StructArray.from_arrays(lists, ["indices", "values"], mask=pa.array(failed))


def _matrices(pa: Any, arrays: Sequence[Any], failed: Any) -> Any:
    width = next((array.shape[1] for array in arrays if array is not None), 0)
    full = [np.zeros((0, width), np.float16) if array is None else array.astype(np.float16) for array in arrays]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(full).ravel()), width)
    return pa.ListArray.from_arrays(_offsets([len(array) for array in full]), vectors, mask=pa.array(failed))


_COLUMNS = {"dense": _dense, "sparse": _sparse, "multivector": _matrices}


def _offsets(lengths: Sequence[int]) -> Any:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
