"""Requests and results of the protocol: from bytes, in JSON or protobuf, to what the server works with, and back.

Requests are checked here as far as their shape goes. Whoever is refused gets a `RequestError` that names the field.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from scipy.sparse import csr_array

from prl.base.errors import UNREADABLE, PrlError
from prl.tinker.protobuf import CLASSES, FLOAT32, INT64

PROTOBUF = "application/x-protobuf"
NO_LOGPROB = -99999.0
"""Logprob of an empty place among the likeliest tokens, as the SDK has it."""
TEXT = "encoded_text"
JSON = "application/json"
T = TypeVar("T")
DTYPES = {FLOAT32: np.float32, INT64: np.int64}
LARGEST = 1 << 24
"""Numbers of a sparse tensor, its empty places included."""
UNPACKED = 1 << 29
"""Bytes that the inputs of a request take once they are read: a sparse tensor of a hundred bytes may become many."""
Indices = np.ndarray | Sequence[int]
Count = Annotated[int, Meta(ge=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Seed = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A number that the generators of torch and of engines take, with room for those behind it."""
Ttl = Annotated[int, Meta(ge=3600, le=10 * 366 * 86400)]
"""Seconds until a checkpoint goes, within the bounds of the protocol."""


class RequestError(PrlError):
    """A request that the server refuses, with the field. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a request, of which every field is known."""


class Chunk(msgspec.Struct):
    """A piece of an input. One of another type than `TEXT` has other fields, and is refused by its type."""

    type: str = TEXT
    tokens: list[int] = []


class Input(Strict):
    """The input of a model."""

    chunks: list[Chunk]


class TensorData(Strict):
    """A tensor in JSON."""

    data: list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class JsonDatum(Strict):
    """A datum in JSON."""

    model_input: Input
    loss_fn_inputs: dict[str, TensorData]


class ForwardInput(Strict):
    """The data and the loss of a pass in JSON."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class OfModel(msgspec.Struct):
    """A request to a model. The client counts them, so that a retry is known as one."""

    model_id: str
    seq_id: Annotated[int, Meta(ge=1)] | None = None


class JsonForward(OfModel):
    """A pass in JSON, as older SDKs send it: to two routes, with two names of the input."""

    forward_backward_input: ForwardInput | None = None
    forward_input: ForwardInput | None = None


class Adam(Strict):
    """The parameters of an optimiser step."""

    learning_rate: NotNegative = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Annotated[float, Meta(ge=1e-30)] = 1e-12  # 0 makes a weight without a gradient NaN, as float32 does of less
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class OptimStep(OfModel):
    adam_params: Adam = msgspec.field(default_factory=Adam)


class SaveWeights(OfModel):
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"


class Lora(Strict):
    """The adapter of a model."""

    rank: int
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Strict):
    type: Literal["adamw"] = "adamw"


class NewModel(msgspec.Struct):
    """A request for a new model, which begins at the base or at a checkpoint."""

    session_id: str = ""
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None


class CreateModel(NewModel):
    lora_config: Lora | None = None


class LoadWeights(NewModel, kw_only=True):
    """A request to load a checkpoint into a model; without a `model_id` into a new one."""

    path: str
    optimizer: bool
    model_id: str = ""
    seq_id: int | None = None


class CheckpointTtl(msgspec.Struct):
    ttl_seconds: Ttl | None


class SamplingParams(Strict):
    """Settings of sampling. `stop` None = at the model's ends of turns; [] = nowhere."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: Seed | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(msgspec.Struct):
    prompt: Input
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None


IGNORED = {"type", "tags", "sdk_version", "project_id", "display_name", "allow_metadata_only"}
"""Fields of requests that the server does without."""


@dataclass
class Datum:
    """A sequence to train on: position i of `tokens` predicts row i of the targets."""

    tokens: list[int]
    inputs: dict[str, np.ndarray]


@dataclass
class Forward:
    """A pass over data, with a backward unless it is `forward_only`."""

    model_id: str
    seq_id: int | None
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


Numbered = OfModel | LoadWeights | Forward
"""Requests to a model that is there, each with its `model_id` and `seq_id`."""


def decode(body: bytes, kind: type[T]) -> T:
    """Read a request in JSON. Raises RequestError with what is wrong, and where.

    A field that the server does not know is refused where it is set: it may mean something to whoever sends it.
    """
    try:
        given = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        for name in given.keys() - IGNORED - set(getattr(kind, "__struct_fields__", given)):
            if given[name]:
                raise RequestError(f"{name[:80]}: this server does not have it")
        return msgspec.convert(given, kind)
    except UNREADABLE as error:
        raise RequestError(f"the request cannot be read: {error}") from None


def read_forward(body: bytes, content_type: str, forward_only: bool) -> Forward:
    """Read the request of a pass, in JSON or protobuf. Raises RequestError."""
    if PROTOBUF not in content_type:
        request = decode(body, JsonForward)
        given = request.forward_backward_input or request.forward_input
        if given is None:
            raise RequestError("forward_backward_input is missing")
        data = _limited(_datum_of_json(datum, f"data[{place}]") for place, datum in enumerate(given.data))
        config = given.loss_fn_config or {}
        return Forward(request.model_id, request.seq_id, data, given.loss_fn, config, forward_only)
    message = CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError, and UnicodeDecodeError of its fields
        raise RequestError(f"the request is no protobuf message: {error}") from None
    settings: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        settings[entry.key] = entry.value.text or entry.value.number
    data = _limited(_datum_of(datum, f"data[{place}]") for place, datum in enumerate(message.data))
    only = forward_only or message.forward_only
    return Forward(message.model_id, message.seq_id or None, data, message.loss_fn, settings, only)


def _limited(data: Iterator[Datum]) -> list[Datum]:
    """Read data one after the other. Raises RequestError before they take too much memory."""
    read: list[Datum] = []
    size = 0
    for datum in data:
        size += sum(values.nbytes for values in datum.inputs.values())
        if size > UNPACKED:
            raise RequestError(f"data[{len(read)}]: the inputs take more than {UNPACKED} bytes: send fewer data", 413)
        read.append(datum)
    return read


def _datum_of_json(datum: JsonDatum, where: str) -> Datum:
    """Read a datum in JSON."""
    tensors = datum.loss_fn_inputs.items()
    inputs = {name: _tensor_of_json(tensor, f"{where}.loss_fn_inputs.{name}") for name, tensor in tensors}
    return Datum(token_ids(datum.model_input, f"{where}.model_input"), inputs)


def _datum_of(message: Any, where: str) -> Datum:
    """Read a datum in protobuf."""
    tokens: list[int] = []
    for place, chunk in enumerate(message.model_input):
        if not chunk.HasField(TEXT):
            raise RequestError(f"{where}.model_input[{place}]: this server takes {TEXT} alone")
        with _at(f"{where}.model_input[{place}].tokens"):
            tokens += np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
    tensors = message.loss_fn_inputs
    return Datum(tokens, {one.key: _tensor_of(one.value, f"{where}.loss_fn_inputs.{one.key}") for one in tensors})


def _tensor_of(message: Any, where: str) -> np.ndarray:
    """Read a tensor in protobuf."""
    if message.dtype not in DTYPES:
        raise RequestError(f"{where}.dtype={message.dtype}: float32 and int64 are known")
    dtype, shape, sparse = DTYPES[message.dtype], list(message.shape), message.sparse_csr
    with _at(where):
        if not message.HasField("sparse_csr"):
            return _whole(np.frombuffer(message.dense, dtype), shape or None)
        rows, columns = (np.frombuffer(part, np.int64) for part in (sparse.crow_indices, sparse.col_indices))
        return _whole(np.frombuffer(sparse.values, dtype), shape, rows, columns)


def _tensor_of_json(tensor: TensorData, where: str) -> np.ndarray:
    """Read a tensor in JSON."""
    with _at(where), np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as that
        values = np.array(tensor.data, dtype=tensor.dtype)
        if tensor.dtype == "int64" and not np.array_equal(values, tensor.data):
            raise ValueError("int64 has whole numbers alone")
        return _whole(values, tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices or ())


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    """Raise RequestError, with the place, for numbers of which no array can be made."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise RequestError(f"{where}: {error}") from None


def _whole(
    values: np.ndarray, shape: list[int] | None, rows: Indices | None = None, columns: Indices = ()
) -> np.ndarray:
    """Give numbers their shape; those of a sparse matrix get the empty places, which are 0. Raises ValueError."""
    if rows is None:
        return values if shape is None else values.reshape(shape)
    if shape is None or math.prod(shape) > LARGEST:
        raise ValueError(f"shape={shape}: a sparse tensor has one, of at most {LARGEST} numbers")
    matrix = csr_array((values, columns, rows), shape=shape)
    matrix.check_format()
    return matrix.toarray()


def token_ids(given: Input, where: str) -> list[int]:
    """Return the token ids of an input. Raises RequestError for one that has more than text."""
    for place, chunk in enumerate(given.chunks):
        if chunk.type != TEXT:
            raise RequestError(f"{where}.chunks[{place}].type={chunk.type[:80]}: this server takes {TEXT} alone")
    return [token for chunk in given.chunks for token in chunk.tokens]


# --- results: plain data, which the journal keeps, and their bytes ---


def encode(result: dict[str, Any], protobuf: bool) -> tuple[bytes, str]:
    """Return the bytes and the content type of a result. Protobuf is for passes and samples alone."""
    kind = result.get("type")
    if protobuf and kind in ("forward", "sample"):
        message = _forward(result) if kind == "forward" else _sample(result)
        return bytes(message.SerializeToString()), PROTOBUF
    return msgspec.json.encode(_forward_json(result) if kind == "forward" else result), JSON


def _forward(result: dict[str, Any]) -> Any:
    """Encode the logprobs of a pass, in a record for each datum."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for data, shape in zip(result["logprobs"], result["shapes"], strict=True):
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        offsets = np.array([0, len(data)], dtype=np.int64).tobytes()
        tensor = {"data": data, "offsets": offsets, "dtype": FLOAT32, "trailing_shape": shape[1:]}
        record.fields.add(key="logprobs", value=tensor)
    for name, value in result["metrics"].items():
        message.metrics.add(key=name, value=value)
    return message


def _forward_json(result: dict[str, Any]) -> dict[str, Any]:
    outputs = [
        {"logprobs": {"data": np.frombuffer(data, np.float32).tolist(), "dtype": "float32", "shape": shape}}
        for data, shape in zip(result["logprobs"], result["shapes"], strict=True)
    ]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": result["metrics"]}


def _sample(result: dict[str, Any]) -> Any:
    message = CLASSES["SampleResponse"]()
    for sequence in result["sequences"]:
        added = message.sequences.add(stop_reason=int(sequence["stop_reason"] == "length"))
        added.tokens = np.array(sequence["tokens"], dtype=np.int32).tobytes()
        added.logprobs = np.array(sequence["logprobs"], dtype=np.float32).tobytes()
        if "topk_logprobs" in sequence:
            _top(added.topk_sampled_logprobs, sequence["topk_logprobs"])
    if "prompt_logprobs" in result:
        message.prompt_logprobs = np.array(result["prompt_logprobs"], dtype=np.float32).tobytes()  # None becomes NaN
    if "topk_prompt_logprobs" in result:
        _top(message.topk_prompt_logprobs, result["topk_prompt_logprobs"])
    return message


def _top(message: Any, places: list[list[list[Any]] | None]) -> None:
    """Encode the likeliest tokens of each place; None where there are none."""
    message.k = max((len(place) for place in places if place), default=0)
    message.length = len(places)
    ids = np.zeros((len(places), message.k), dtype=np.int32)
    logprobs = np.full(ids.shape, NO_LOGPROB, dtype=np.float32)
    for row, place in enumerate(places):
        for column, (token, logprob) in enumerate(place or ()):
            ids[row, column], logprobs[row, column] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
