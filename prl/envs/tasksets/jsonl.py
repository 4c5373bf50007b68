"""Prompts and answers of your own, from a .jsonl, .json, .csv or .parquet file or a data set on the hub.

    {"prompt": "Capital of France?", "answer": "Paris"}

A prompt is a text or a list of chat messages, in OpenAI's format or verifiers'; an answer is a text or a number. The
reward of a reply is what `grader` says: `exact`, `numeric` or `math_verify` (`prl.envs.tasksets.graders`), or your
function grade(reply, answer); {_target_: my.grade, tolerance: 0.1} for arguments.

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
from typing import Any, ClassVar, Literal

import verifiers.v1 as vf
from pydantic import Field, field_validator

from prl.config.build import function
from prl.envs.tasksets.base import AnswerTask
from prl.envs.tasksets.files import hub_files, rows_of
from prl.envs.tasksets.graders import GRADERS, QUICK, fault_of
from prl.errors import UNREADABLE, ConfigError
from prl.monitors.text import in_one_line

__all__ = ["JsonlTaskset"]

Grade = Callable[[str, str], float]
CHAT = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')
"""How a list of chat messages begins that is written as JSON."""
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""What JSON can spell, but no UTF-8."""


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
    """Number of tasks; null = all."""
    path: str
    """A file, several by a pattern (`data/train-*.parquet`), or `hub:owner/name:split` (`hub:owner/name/folder:split`
    for one of several configurations)."""
    eval_path: str | None = None
    """Held-out lines, like `path`; null = a share of the lines of `path`."""
    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of held-out prompts, at least one prompt; 0 = none. Not with `eval_path`."""
    prompt_key: str = "prompt"
    """The key of a line's prompt."""
    answer_key: str = "answer"
    """The key of a line's answer."""
    demonstration_key: str | None = None
    """The key of a reply to imitate (`algo.sampling.source=demonstrations`, `algo=opsd`); null = none."""
    system: str | None = None
    """A system message before every prompt; `system_prompt`, which every taskset has, is a file."""
    grader: str | dict[str, Any] = "exact"
    """`exact`, `numeric`, `math_verify`, or a function of yours."""

    @field_validator("grader")
    @classmethod
    def _known(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        grader_of(value)
        return value

    answer_types: ClassVar[tuple[type, ...]] = (str, int, float)
    """What a row's answer may be."""

    @functools.cached_property
    def grade(self) -> Grade:
        """The grader."""
        return grader_of(self.grader)

    def graded_answer(self, answer: Any) -> str:
        """Return what of a row's answer replies are graded against."""
        return str(answer)

    def fault_of(self, answer: str) -> str | None:
        """Return why no reply can be graded against `answer`; None if one can."""
        return fault_of(answer, self.grader)


class JsonlTask(AnswerTask[JsonlData]):
    """A hash of the row is its identity."""

    settings: JsonlConfig

    def grade(self, reply: str) -> float:
        return float(self.settings.grade(reply, self.data.answer))


class JsonlTaskset(vf.Taskset[JsonlTask, JsonlConfig]):
    """The rows, in random order."""

    @property
    def IN_PROCESS(self) -> bool:
        """Most of prl's graders are quick; nobody knows of one of yours."""
        return isinstance(self.config.grader, str) and self.config.grader in QUICK

    def load(self) -> Iterator[JsonlTask]:
        rows = list(split_of(self.config))
        random.Random(self.config.seed).shuffle(rows)
        for data in rows[: self.config.num_tasks]:
            task = self.task_type()(data, self.config.task)
            task.settings = self.config
            yield task


def split_of(config: JsonlConfig) -> Iterator[JsonlData]:
    """Yield the rows of the chosen split; raise ValueError naming what cannot be read."""
    rows = [(_digest(row.prompt), row) for row in read(config, config.path)]
    if config.eval_path is not None:
        held_out = read(config, config.eval_path)
        chosen = {_digest(row.prompt) for row in held_out}
    else:
        prompts = sorted({prompt for prompt, _ in rows})
        count = max(1, round(config.eval_fraction * len(prompts))) if config.eval_fraction and len(prompts) > 1 else 0
        chosen = set(prompts[:count])
        held_out = [row for prompt, row in rows if prompt in chosen]
    if config.split == "eval":
        if not held_out:
            raise ValueError("no prompt is held out: set eval_path or eval_fraction, or the env's eval_args to null")
        yield from held_out
        return
    yield from (row for prompt, row in rows if prompt not in chosen)


def read(config: JsonlConfig, path: str) -> list[JsonlData]:
    """Return the distinct rows of a file or a data set; raise ValueError naming file, line and key of a bad one."""
    local = Path(path).expanduser()
    files = sorted(local.parent.glob(local.name)) if "*" in local.name else [local]
    if path.startswith("hub:"):
        name, colon, split = path.removeprefix("hub:").rpartition(":")
        if not colon or name.count("/") < 1 or not split:
            raise ValueError(f"{path!r}: write hub:owner/name:split")
        files = hub_files(name, split)
    distinct: dict[str, JsonlData] = {}
    for file in files:
        for place, row in rows_of(file):
            data = task_of(config, row, f"{file}, {place}")
            distinct.setdefault(str(data.id), data)
    if not distinct:
        raise ValueError(f"{path} has no rows")
    return list(distinct.values())


def task_of(config: JsonlConfig, row: Any, place: str) -> JsonlData:
    """Return the task of a row; raise ValueError, with its `place`, for a key that is missing or of a wrong type."""
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row is a mapping of keys to values, got {type(row).__name__}")
    value = functools.partial(_value, row, place)
    prompt = value(config.prompt_key, str, list)
    answer = value(config.answer_key, *config.answer_types)
    graded = config.graded_answer(answer)
    if (fault := config.fault_of(graded)) is not None:
        raise ValueError(f"{place}: key {config.answer_key!r} {fault}, got {answer!r:.80}")
    demonstration = value(config.demonstration_key, str, list) if config.demonstration_key else None
    if isinstance(prompt, str) and CHAT.match(prompt):  # a column of a CSV file has texts alone
        with contextlib.suppress(*UNREADABLE):
            prompt = json.loads(prompt)
    try:
        if isinstance(demonstration, list):
            demonstration = [with_text(message) for message in demonstration]
        return JsonlData(
            id=_digest([prompt, answer, demonstration]),
            prompt=prompt if isinstance(prompt, str) else [as_verifiers(message) for message in prompt],
            system_prompt=config.system,
            answer=graded,
            demonstration=demonstration,
        )
    except (AttributeError, TypeError, ValueError) as error:
        key = config.prompt_key
        raise ValueError(f"{place}: key {key!r} is no list of chat messages: {in_one_line(error)}") from error


def as_verifiers(message: Any) -> Any:
    """Return a chat message with its tool calls as verifiers has them, which OpenAI's format nests in `function`."""
    message = with_text(message)
    if message.get("function_call"):
        raise ValueError("function_call: write it as tool_calls, which have taken its place")
    if not message.get("tool_calls"):
        return message
    calls = [call | (call.get("function") or {}) for call in message["tool_calls"]]
    return message | {"tool_calls": [call | {"arguments": arguments_of(call)} for call in calls]}


def arguments_of(call: dict[str, Any]) -> str:
    """Return the arguments of a tool call as text; raise ValueError if they are no JSON object."""
    arguments = call.get("arguments") or "{}"  # a tool without parameters may have none
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(json.loads(text), dict):
        raise ValueError(f"the arguments of a tool call must be a JSON object, got {text:.80}")
    return text


def with_text(message: Any) -> Any:
    """Return a message with the text parts of its content as one text; raise ValueError for another kind of part."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if any(part.get("type") != "text" for part in content):
        raise ValueError(f"a part of a message's content must be {{type: text, text: <text>}}, got {content!r:.200}")
    return message | {"content": "".join(part["text"] for part in content)}


def _value(row: dict[str, Any], place: str, key: str, *types: type) -> Any:
    outer, _, inner = key.partition(".")
    if key not in row and inner and isinstance(row.get(outer), dict):  # reward_model.ground_truth
        return _value(row[outer], f"{place}, {outer!r}", inner, *types)
    if key not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{place}: there is no {key!r} (its keys: {keys})")
    value = row[key]
    if value is None:
        raise ValueError(f"{place}: key {key!r} has no value")
    odd = isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))  # numbers to Python
    if not isinstance(value, types) or odd or value in ("", []):
        wanted = " or ".join(cls.__name__ for cls in types)
        raise ValueError(f"{place}: key {key!r} must be {wanted} and not empty, got {value!r:.80}")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if HALF_CHARACTER.search(text):
        raise ValueError(f"{place}: key {key!r} has a character in it that no tokenizer takes: {text!r:.80}")
    return value


def _digest(value: Any) -> str:
    """A hash of a value, also of a task's prompt, that is the same in every process."""
    return hashlib.sha256(SPELT.encode(value).encode()).hexdigest()[:16]


SPELT = json.JSONEncoder(sort_keys=True, default=lambda message: message.model_dump(exclude_none=True))
"""Made once: to make it takes longer than to spell a prompt."""
