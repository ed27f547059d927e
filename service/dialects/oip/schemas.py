"""The schemas of the Open Inference Protocol: request bodies, answers and errors."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from service.http.fields import Body, unsupported_fields
from service.tokenization.texts import Side

_SHARED_MEMORY = unsupported_fields("shared_memory_region shared_memory_offset shared_memory_byte_size")


class Given(Body, strict=True):
    """The base class of the protocol's objects. Types are strict ("7" and true are not numbers), and unknown keys are ignored."""


class RequestParameters(Given):
    """The parameters of a whole request. Other keys than fields and `unsupported` ones are ignored."""

    unsupported = unsupported_fields("sequence_id sequence_start sequence_end priority timeout")

    binary_data_output: bool | None = Field(None, description="Send every output as bytes after the JSON.")
    truncate: bool | Side | None = Field(None, description="right or true, left, none or false; the service's setting without it.")
    prompt_name: str | None = Field(None, max_length=256, description="A prompt of the checkpoint, put before each text.")


class InputParameters(Given):
    ignored = frozenset(("content_type",))
    unsupported = _SHARED_MEMORY

    binary_data_size: int | None = Field(
        None, ge=0, lt=2**40, description="The data is so many bytes after the JSON, in the inputs' order."
    )


class OutputParameters(Given):
    unsupported = unsupported_fields(_SHARED_MEMORY, "classification")

    binary_data: bool | None = Field(
        None, description="Send this output as bytes after the JSON, or not, whatever the request says of all."
    )


class InputTensor(Given):
    name: str = Field(max_length=256)
    datatype: str = Field(max_length=16, description="BYTES for text, INT64 for ids.")
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=8)
    data: list[Any] | None = Field(None, description="Row-major, flat or nested by the shape.")
    parameters: InputParameters = Field(default_factory=InputParameters.model_construct)


class WantedOutput(Given):
    name: str = Field(max_length=256)
    parameters: OutputParameters = Field(default_factory=OutputParameters.model_construct)


class InferRequest(Given):
    """The body of an inference request. Unknown keys are ignored."""

    id: str | None = Field(None, max_length=1024, description="Comes back with the answer.")
    parameters: RequestParameters = Field(default_factory=RequestParameters.model_construct)
    inputs: list[InputTensor] = Field(min_length=1, max_length=8)
    outputs: list[WantedOutput] | None = Field(
        None, max_length=8, description="All of the model's without it. Each is a run of its own: name those that are needed."
    )


class OutputTensor(BaseModel):
    name: str
    datatype: Literal["FP32"]
    shape: list[int]
    data: list[float] = Field([], description="Flat, row-major; missing where the output is binary.")
    parameters: dict[str, int] = Field({}, description="binary_data_size, where the output is binary.")


class InferResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfiguredTensor(BaseModel):
    name: str
    data_type: str
    dims: list[int] = Field(description="Without the batch's axis.")
    format: str | None = None


class ModelConfig(BaseModel):
    """The fields of Triton's model configuration that apply here."""

    name: str
    platform: str
    backend: str
    version_policy: dict[str, Any]
    max_batch_size: int = Field(description="Most inputs of a request; 0 where the model is not asked here.")
    input: list[ConfiguredTensor]
    output: list[ConfiguredTensor]
    dynamic_batching: dict[str, Any]


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class OipErrorResponse(BaseModel):
    error: str
