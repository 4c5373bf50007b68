"""Prompts and answers of your own, from a .jsonl, .json, .csv or .parquet file or a data set on the hub.

    {"prompt": "Capital of France?", "answer": "Paris"}

A prompt is a text or a list of chat messages, in OpenAI's format or verifiers'; an answer is a text or a number. The
reward of a reply is what `grader` says: `exact`, `numeric` or `math_verify` (`prl.envs.graders`), or your function
grade(reply, answer); {_target_: my.grade, tolerance: 0.1} for arguments.

Held-out tasks are the rows of `eval_path`, else `eval_fraction` of the prompts, chosen by a hash of their content. No
prompt is in both splits. Equal rows count once.
"""

import contextlib
import functools
import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field, ValidationError, field_validator

from prl.config.build import function
from prl.envs.base import AnswerTask
from prl.envs.files import hub_files, rows_of
from prl.envs.graders import GRADERS, QUICK, fault_of
from prl.errors import UNREADABLE, ConfigError

__all__ = ["JsonlTaskset"]

Grade = Callable[[str, str], float]
CHAT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')
"""How a list of chat messages begins that is written as JSON."""


def grader_of(value: str | dict[str, Any]) -> Grade:
    """Return the grader that the setting names; raise ValueError if it names none."""
    if isinstance(value, str) and value in GRADERS:
        return GRADERS[value]
    if isinstance(value, str) and "." not in value:
        raise ValueError(f"{value!r} is neither {' nor '.join(GRADERS)} nor the dotted path of a function")
    try:
        return function({"_target_": value} if isinstance(value, str) else value, "grader", values=2)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class JsonlData(vf.TaskData):
    answer: str
    """What a reply is graded against."""
    demonstration: Any = None
    """A reply to imitate: a text, or a list of messages. Not part of the prompt."""


class JsonlConfig(vf.TasksetConfig):
    split: Literal["train", "eval"] = "train"
    """Which split to take."""
    seed: int = 0
    """The order of the tasks."""
    num_tasks: int | None = Field(None, ge=1)
    """How many; null = all."""
    path: str
    """A file, or `hub:owner/name:split` (`hub:owner/name/folder:split` for one of several configurations)."""
    eval_path: str | None = None
    """Where the held-out rows are, as `path`; null = a share of the rows of `path`."""
    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """That share, at least one prompt; 0 = none. Not read with `eval_path`."""
    prompt_key: str = "prompt"
    """The key of a row's prompt."""
    answer_key: str = "answer"
    """The key of its answer."""
    demonstration_key: str | None = None
    """The key of a reply to imitate (`algo.sampling.source=demonstrations`, `algo=opsd`); null = there is none."""
    system: str | None = None
    """A system message before every prompt; `system_prompt`, which every taskset has, is a file."""
    grader: str | dict[str, Any] = "exact"
    """`exact`, `numeric`, `math_verify`, or a function of yours."""

    @field_validator("grader")
    @classmethod
    def _known(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        grader_of(value)
        return value


class JsonlTask(AnswerTask[JsonlData]):
    """A hash of the row is its identity."""

    grader: Grade

    def grade(self, reply: str) -> float:
        return float(self.grader(reply, self.data.answer))


class JsonlTaskset(vf.Taskset[JsonlTask, JsonlConfig]):
    """The rows, in random order."""

    @property
    def IN_PROCESS(self) -> bool:
        """Most of prl's graders are quick; nobody knows of one of yours."""
        return isinstance(self.config.grader, str) and self.config.grader in QUICK

    def load(self) -> Iterator[JsonlTask]:
        config = self.config
        rows = list(split_of(config))
        random.Random(config.seed).shuffle(rows)
        for data in rows[: config.num_tasks]:
            task = JsonlTask(data, config.task)
            task.grader = grader_of(config.grader)
            yield task


def split_of(config: JsonlConfig) -> Iterator[JsonlData]:
    """Yield the rows of the chosen split; raise ValueError naming what cannot be read."""
    rows = [(_digest(row.prompt), row) for row in read(config, config.path)]
    if config.eval_path is not None:
        kept_apart = read(config, config.eval_path)
        chosen = {_digest(row.prompt) for row in kept_apart}
    else:
        prompts = sorted({prompt for prompt, _ in rows})
        count = max(1, round(config.eval_fraction * len(prompts))) if config.eval_fraction and len(prompts) > 1 else 0
        chosen = set(prompts[:count])
        kept_apart = [row for prompt, row in rows if prompt in chosen]
    if config.split == "eval":
        if not kept_apart:
            raise ValueError("no prompt is held out: set eval_path or eval_fraction, or the env's eval_args to null")
        yield from kept_apart
        return
    yield from (row for prompt, row in rows if prompt not in chosen)


def read(config: JsonlConfig, path: str) -> list[JsonlData]:
    """Return the distinct rows of a file or a data set; raise ValueError naming file, line and key of a bad one."""
    files = [Path(path).expanduser()]
    if path.startswith("hub:"):
        name, colon, split = path.removeprefix("hub:").rpartition(":")
        if not colon or name.count("/") < 1 or not split:
            raise ValueError(f"{path!r}: write hub:owner/name:split")
        files = hub_files(name, split)
    found: dict[str, JsonlData] = {}
    for file in files:
        for place, row in rows_of(file):
            data = task_of(config, row, f"{file}, {place}")
            found.setdefault(str(data.id), data)
    if not found:
        raise ValueError(f"{path} has no rows")
    return list(found.values())


def task_of(config: JsonlConfig, row: Any, place: str) -> JsonlData:
    """Return the task of a row; raise ValueError, with its `place`, for a key that is missing or of a wrong type."""
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row is a mapping of keys to values, got {type(row).__name__}")
    value = functools.partial(_value, row, place)
    prompt = value(config.prompt_key, str, list)
    answer = value(config.answer_key, str, int, float)
    if (fault := fault_of(str(answer), config.grader)) is not None:
        raise ValueError(f"{place}: key {config.answer_key!r} {fault}, got {answer!r:.80}")
    demonstration = value(config.demonstration_key, str, list) if config.demonstration_key else None
    if isinstance(prompt, str) and CHAT.match(prompt):  # a column of a CSV file has texts alone
        with contextlib.suppress(*UNREADABLE):
            prompt = json.loads(prompt)
    if isinstance(demonstration, list):
        demonstration = [with_text(message, f"{place}: {config.demonstration_key}") for message in demonstration]
    unread = f"{place}: key {config.prompt_key!r} is no list of chat messages"
    try:
        return JsonlData(
            id=_digest([prompt, answer, demonstration]),
            prompt=prompt if isinstance(prompt, str) else chat_messages(prompt),
            system_prompt=config.system,
            answer=str(answer),
            demonstration=demonstration,
        )
    except ValidationError as error:
        # Of a list, pydantic says as well that it is no text.
        problem = next(each for each in error.errors() if each["loc"][1:] != ("str",))
        _, _, number, *path = problem["loc"]
        field = ".".join(str(part) for part in path[1:] if part != "str" and "[" not in str(part))
        raise ValueError(f"{unread}: message {int(number) + 1}: {field and field + ': '}{problem['msg']}") from error
    except ValueError as error:
        raise ValueError(f"{unread}: {error}") from error


def chat_messages(prompt: list[Any]) -> list[Any]:
    """Return chat messages with their tool calls as verifiers has them, which OpenAI's format nests in `function`.

    Raises ValueError naming message and field of a call that cannot be read.
    """
    messages = [with_text(message, f"message {number}") for number, message in enumerate(prompt, start=1)]
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if message.get("function_call"):
            raise ValueError(f"message {number + 1}: function_call: write it as tool_calls, which have taken its place")
        if message.get("role") == "developer":  # OpenAI's newer name
            messages[number] = message = message | {"role": "system"}
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            where = f"message {number + 1}: tool_calls"
            flat = [flat_call(call, f"{where}.{place}") for place, call in enumerate(calls)]
            messages[number] = message | {"tool_calls": flat}
    return messages


def with_text(message: Any, where: str) -> Any:
    """Return a message with the text parts of its content as one text; raise ValueError for another kind of part."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: content: a part must be {{type: text, text: <text>}}, got {part!r:.80}")
    return message | {"content": "".join(part["text"] for part in content)}


def flat_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its name beside its arguments, and these as text; raise ValueError naming the field."""
    nested = isinstance(call, dict) and call.get("function") is not None
    function = call["function"] if nested else call
    where += ".function" if nested else ""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.name must be a text, got {function!r:.80}")
    arguments = function.get("arguments")
    if arguments in (None, ""):  # of a tool without parameters
        arguments = "{}"
    try:
        read = arguments if isinstance(arguments, dict) else json.loads(str(arguments))
    except UNREADABLE:
        read = None
    if not isinstance(read, dict):
        raise ValueError(f"{where}.arguments must be a JSON object, as text or not, got {arguments!r:.80}")
    text = arguments if isinstance(arguments, str) else json.dumps(read, ensure_ascii=False)
    return call | {"name": function["name"], "arguments": text}


def _value(row: dict[str, Any], place: str, key: str, *types: type) -> Any:
    outer, _, inner = key.partition(".")
    if key not in row and inner and isinstance(row.get(outer), dict):  # reward_model.ground_truth
        return _value(row[outer], f"{place}, {outer!r}", inner, *types)
    if key not in row:
        held = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{place}: there is no {key!r} (its keys: {held})")
    value = row[key]
    if value is None:
        raise ValueError(f"{place}: key {key!r} has no value")
    odd = isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))  # numbers to Python
    if not isinstance(value, types) or odd or value in ("", []):
        wanted = " or ".join(cls.__name__ for cls in types)
        raise ValueError(f"{place}: key {key!r} must be {wanted} and not empty, got {value!r:.80}")
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a character, which no tokenizer takes
        half = ascii(error.object[error.start])
        raise ValueError(f"{place}: key {key!r} has {half} in it, which is no character by itself") from error
    return value


def _digest(value: Any) -> str:
    """A hash of a value, also of a task's prompt, that is the same in every process."""
    return hashlib.sha256(SPELT.encode(value).encode()).hexdigest()[:16]


SPELT = json.JSONEncoder(sort_keys=True, default=lambda message: message.model_dump(exclude_none=True))
"""Made once: to make it takes longer than to spell a prompt."""
