"""The protobuf messages of the protocol, of which the server needs only these fields (`tinker` 0.38)."""

from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MESSAGES = {
    "Tensor": "dense:bytes=1 sparse_csr:SparseCsr=2 dtype:int32=3 shape:int64*=4",
    "SparseCsr": "values:bytes=1 crow_indices:bytes=2 col_indices:bytes=3",
    "TokenChunk": "tokens:bytes=1",
    "OtherChunk": "",
    "Chunk": "encoded_text:TokenChunk=1 image:OtherChunk=2 dmel:OtherChunk=3",
    "TensorEntry": "key:string=1 value:Tensor=2",
    "Datum": "model_input:Chunk*=1 loss_fn_inputs:TensorEntry*=2",
    "NumberEntry": "key:string=1 value:double=2",
    "Setting": "number:double=1 text:string=2",
    "SettingEntry": "key:string=1 value:Setting=2",
    "ForwardBackwardRequest": "model_id:string=1 seq_id:int32=2 data:Datum*=3 loss_fn:string=4 "
    "loss_fn_config:NumberEntry*=5 forward_only:bool=6 loss_fn_config_v2:SettingEntry*=7",
    "BatchedTensor": "data:bytes=1 offsets:bytes=2 dtype:int32=3 trailing_shape:int64*=4",
    "FieldEntry": "key:string=1 value:BatchedTensor=2",
    "ArrayRecord": "type_tag:string=1 fields:FieldEntry*=2 num_datums:int64=3",
    "ForwardBackwardOutput": "loss_fn_output_type:string=1 loss_fn_outputs:ArrayRecord*=2 metrics:NumberEntry*=3",
    "TopkLogprobs": "token_ids:bytes=1 logprobs:bytes=2 k:uint32=3 length:uint32=4",
    "SampledSequence": "stop_reason:int32=1 tokens:bytes=2 logprobs:bytes=3 topk_sampled_logprobs:TopkLogprobs=4",
    "SampleResponse": "sequences:SampledSequence*=1 prompt_logprobs:bytes=2 topk_prompt_logprobs:TopkLogprobs=3",
}
"""Fields of each message, `name:type=number`, with `*` where there may be several. A map is a list of entries, and an
enum an int32: on the wire they are the same."""
FLOAT32, INT64 = 1, 2
"""Numbers of the two dtypes that the SDK sends."""


def _messages() -> dict[str, Callable[..., Any]]:
    """Make the classes of `MESSAGES`, in a pool of their own: the SDK may be in the same process."""
    field_of = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="prl_tinker.proto", package="prl_tinker", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for entry in fields.split():
            key, _, rest = entry.partition(":")
            kind, _, number = rest.partition("=")
            several = kind.endswith("*")
            kind = kind.removesuffix("*")
            field = message.field.add(name=key, number=int(number))
            field.label = field_of.LABEL_REPEATED if several else field_of.LABEL_OPTIONAL
            if kind in MESSAGES:
                field.type, field.type_name = field_of.TYPE_MESSAGE, f".prl_tinker.{kind}"
            else:
                field.type = getattr(field_of, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"prl_tinker.{name}")) for name in MESSAGES
    }


CLASSES = _messages()
