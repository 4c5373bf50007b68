"""Losses that clients have traced: torch.fx's nodes as plain data, interpreted by a list of allowed operations.

A loss is kept by nobody: its id, which every pass names, is the loss itself. So passes that are run again after a
restart, and other ranks, have it too. Nothing of it is evaluated, imported or unpickled.
"""

import base64
import itertools
import math
import operator
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from prl.base.errors import UNREADABLE
from prl.base.text import in_one_line
from prl.tinker.wire import RequestError, Strict

MARK = "graph:"
"""Beginning of the id of a traced loss."""
LARGEST = 1 << 24
"""Numbers that an operation may read or make."""
LONGEST = 1 << 16
"""Characters of an id."""
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
OPERATORS = "abs add and_ eq floordiv ge getitem gt invert le lt mod mul ne neg or_ pos pow sub truediv xor"
BOTH = (
    "abs add all amax amin any ceil clamp clamp_max clamp_min clone cumprod cumsum detach diff div dot eq erf exp "
    "expm1 flatten flip floor ge gt isfinite isinf isnan le lerp log log1p log_softmax logaddexp logical_and "
    "logical_not logical_or logsumexp lt masked_fill max maximum mean median min minimum mul nan_to_num ne neg "
    "norm numel pow prod reciprocal reshape roll round rsqrt sigmoid sign softmax sqrt square squeeze std sub sum "
    "tanh unsqueeze var where"
)
"""Operations that are functions of torch and methods of a tensor."""
METHODS = "bool dim double float int long size to type_as view"
FUNCTIONS = "cat full_like ones_like stack zeros_like"
LOSSES = (
    "binary_cross_entropy_with_logits elu gelu huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid mse_loss "
    "relu silu smooth_l1_loss softmax softplus tanh"
)
"""Functions of torch.nn.functional."""
ATTRIBUTES = ("T", "device", "dtype", "indices", "ndim", "shape", "values")
DTYPES = {"bool": torch.bool, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


def attribute(value: Any, name: str) -> Any:
    """Return an attribute of a tensor, or of what `max` returns. Raises TypeError for another."""
    if name not in ATTRIBUTES or not isinstance(value, Tensor | tuple):
        raise TypeError(f"the attribute {name!r} is not taken")
    return getattr(value, name)


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    **{("call_function", f"operator.{name}"): getattr(operator, name) for name in OPERATORS.split()},
    **{("call_function", f"torch.{name}"): getattr(torch, name) for name in f"{BOTH} {FUNCTIONS}".split()},
    **{("call_function", f"torch.nn.functional.{name}"): getattr(functional, name) for name in LOSSES.split()},
    ("call_function", "torch._C._nn.softplus"): functional.softplus,  # as torch.fx names them
    ("call_function", "torch._C._nn.log_sigmoid"): functional.logsigmoid,
    ("call_function", "torch._C._nn.gelu"): functional.gelu,
    ("call_function", "getattr"): attribute,
    **{("call_method", name): getattr(Tensor, name) for name in f"{BOTH} {METHODS}".split()},
}
"""What each operation of a graph does."""


class Node(Strict):
    op: str
    name: str
    target: str
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class Graph(Strict):
    nodes: list[Node]
    format: Literal[1] = 1


class Given(Strict):
    """An input: the model's logprobs, or one of a datum's, and its number of dimensions."""

    name: str
    rank: Literal[0, 1, 2]


class Traced(msgspec.Struct, frozen=True):
    """A loss of one datum."""

    inputs: list[Given]
    """`logprobs`, and then those of the datum that it reads."""
    graph: Graph

    @property
    def id(self) -> str:
        """The id by which a pass names it."""
        return MARK + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def of_id(cls, loss_id: object) -> "Traced":
        """Read a loss, and check it. Raises RequestError with the operation that is not allowed."""
        try:
            if not isinstance(loss_id, str) or not loss_id.startswith(MARK) or len(loss_id) > LONGEST:
                raise ValueError(f"an id of create_custom_loss is wanted, of at most {LONGEST} characters")
            traced = msgspec.msgpack.decode(base64.urlsafe_b64decode(loss_id.removeprefix(MARK)), type=cls)
        except UNREADABLE as error:
            raise RequestError(f"loss_fn_config.loss_id: {error}") from None
        traced.check()
        return traced

    def check(self) -> None:
        """Raise RequestError, naming it, for an operation that is not allowed, and for inputs that do not fit."""
        names = [given.name for given in self.inputs]
        if names[:1] != ["logprobs"] or names != [node.target for node in self.graph.nodes if node.op == "placeholder"]:
            raise RequestError("inputs: these are not those of the graph, which begin with logprobs")
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output") and (node.op, node.target) not in ALLOWED:
                raise RequestError(
                    f"graph.{node.name[:80]}: {node.op} {node.target[:80]} is none of the operations that this server "
                    "runs; forward_backward_custom with a function computes any loss in the client"
                )

    def run(self, given: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and its metrics. Raises RequestError, naming the operation, for one that fails."""
        values: dict[str, Any] = {}
        inputs = iter(given)
        for node in self.graph.nodes:
            try:
                if node.op == "placeholder":
                    values[node.name] = next(inputs)
                    continue
                args = [_value(arg, values) for arg in node.args]
                kwargs = {key: _value(arg, values) for key, arg in node.kwargs.items()}
                if node.op == "output":
                    return _checked(args[0])
                _check_size(node, [*args, *kwargs.values()])
                values[node.name] = ALLOWED[node.op, node.target](*args, **kwargs)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise RequestError(f"graph.{node.name[:80]}: {node.target[:80]}: {in_one_line(error)}") from None
        raise RequestError("graph: it has no output")


def _value(arg: Any, values: dict[str, Any]) -> Any:
    """Decode an argument. Raises LookupError, TypeError or ValueError for one that is not taken."""
    if isinstance(arg, list):
        return [_value(each, values) for each in arg]
    if not isinstance(arg, dict):
        return arg
    [(kind, content)] = arg.items()
    match kind:
        case "ref":
            return values[content]
        case "tuple":
            return tuple(_value(each, values) for each in content)
        case "dict":
            return {key: _value(each, values) for key, each in content.items()}
        case "slice":
            return slice(*(_value(each, values) for each in content))
        case "ellipsis":
            return ...
        case "float":
            return float(content)
        case "dtype":
            return DTYPES[content]
    raise ValueError(f"an argument that is a {kind} is not taken")


def _check_size(node: Node, arguments: list[Any]) -> None:
    """Raise ValueError for an operation that would take much time or memory."""
    lists = [argument if isinstance(argument, list | tuple) else [argument] for argument in arguments]
    tensors = [each for each in itertools.chain(*lists) if isinstance(each, Tensor)]
    shapes = [tensor.shape for tensor in tensors]
    read = sum(map(math.prod, shapes))
    made = 1  # of what stands beside each other, as in an addition; others make no more than they read
    for sizes in zip(*([1] * (8 - len(shape)) + list(shape) for shape in shapes), strict=False):
        made *= max(sizes)
    if max(read, made) > LARGEST:
        raise ValueError(f"this takes more than {LARGEST} numbers")
    plain = [each for each in arguments if not isinstance(each, Tensor)]
    if node.target.startswith("operator.") and node.target != "operator.getitem":
        if not all(isinstance(each, int | float) and abs(each) < 1 << 62 for each in plain):
            raise TypeError("numbers are wanted")
        if node.target == "operator.pow" and not tensors:
            raise TypeError("a tensor is wanted")


def _checked(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a graph gave. Raises TypeError unless it is a loss and its metrics, all of one number."""
    loss, metrics = output
    for value in (loss, *metrics.values()):
        if not isinstance(value, Tensor) or value.dim():
            raise TypeError("loss and metrics have to be tensors of one number")
    if wrong := [str(key) for key in metrics if not METRIC.fullmatch(key)]:
        raise TypeError(f"the metric {wrong[0][:80]!r} has to be named custom/<name>:sum or custom/<name>:mean")
    return loss, metrics
