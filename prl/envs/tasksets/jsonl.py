"""Prompts and answers of your own, from a .jsonl, .json, .csv or .parquet file or a data set on the hub.

    {"prompt": "Capital of France?", "answer": "Paris"}

Prompt, answer and a reply to imitate are found by the keys of each row (`prl.envs.tasksets.layouts`), or named. A
prompt is a text or a list of chat messages, an answer a text or a number. The reward of a reply is what `grader` says:
`exact`, `numeric` or `math_verify` (`prl.envs.tasksets.graders`), or your function grade(reply, answer); {_target_:
my.grade, tolerance: 0.1} for arguments. A row needs an answer only where prl's graders are to grade replies to it.

Held-out tasks are the rows of `eval_path`, else `eval_fraction` of the prompts, chosen by a hash of their content; rows
that cannot be graded always train. No prompt is in both splits. Equal rows count once.
"""

import functools
import hashlib
import json
import math
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import verifiers.v1 as vf
from pydantic import Field, PrivateAttr, field_validator
from verifiers.v1.dialects.chat import message_to_wire

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.build import maker
from prl.envs.tasksets.base import AnswerTask
from prl.envs.tasksets.files import hub_files, missing_parts, rows_of
from prl.envs.tasksets.graders import GRADERS, QUICK, fault_of
from prl.envs.tasksets.layouts import (
    ANSWERS,
    FALSE,
    IS_GOOD,
    SYSTEMS,
    UNREAD,
    decoded,
    divided,
    layout_of,
    messages_of,
    tools_of,
)
from prl.envs.tasksets.row_pictures import urls_in, with_pictures
from prl.rollouts.images import NOWHERE, Origin, decode
from prl.rollouts.pictures import MAX_PIXELS, PictureError, digest_of

__all__ = ["JsonlTaskset"]

Grade = Callable[[str, str], float]
Notes = defaultdict[str, list[str]]
"""Parts of rows that are left out, and their places."""
NO_TOOLS: tuple[Any, ...] = (None, "", "[]", [])
"""Values of `tools` in rows that declare none."""
SAID = ("content", "tool_calls", "reasoning_content")
"""Parts of a message that can be imitated: one of these at least."""
PIXELS: dict[tuple[str, Path | None], str] = {}
"""Digests of the pictures that this process has read to divide rows: it does so for each split."""
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""Unpaired surrogates, which JSON can spell, but no UTF-8."""


def grader_of(value: str | dict[str, Any]) -> Grade:
    """Return the grader that the setting names; raise ValueError if it names none."""
    if isinstance(value, str) and value in GRADERS:
        return GRADERS[value]
    if isinstance(value, str) and "." not in value:
        raise ValueError(f"{value!r} is neither {' nor '.join(GRADERS)} nor the dotted path of a function")
    try:
        return maker({"_target_": value} if isinstance(value, str) else value, Callable, "grader", values=2)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class JsonlData(vf.TaskData):
    answer: str = ""
    """Text that a reply is graded against; empty where the row has no answer."""
    demonstration: Any = None
    """A reply to imitate: a text, or a list of messages. Not part of the prompt."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the prompt declares to the model, in OpenAI's format; nothing carries out their calls."""
    _place: str = PrivateAttr("")
    """File and line."""
    _conversation: str = PrivateAttr("")
    """A hash of the first prompt of its conversation."""
    _opening: Any = PrivateAttr(None)
    """The messages of that prompt, if it has pictures, until these are known by their pixels (`name_by_pixels`)."""
    _origin: Origin = PrivateAttr(NOWHERE)
    """The places from where its pictures may come."""


class RowsConfig(vf.TasksetConfig):
    """Settings of a taskset whose tasks are rows, a share of which is held out."""

    split: Literal["train", "eval"] = "train"
    """Split to take."""
    seed: int = 0
    """The order of the tasks."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of tasks; null = all."""
    eval_path: str | None = None
    """Held-out rows, like `path`; null = a share of the rows of `path`."""
    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of held-out prompts, at least one; 0 = none. Not with `eval_path`."""
    system: str | None = None
    """A system message before every prompt; `system_prompt`, which every taskset has, is a file."""

    def held_out(self, keys: Collection[str]) -> list[str]:
        """Return the keys of the share that is held out, in their order; none of a single one."""
        count = max(1, round(self.eval_fraction * len(keys))) if self.eval_fraction and len(keys) > 1 else 0
        return sorted(keys)[:count]


class JsonlConfig(RowsConfig):
    path: str
    """A file, several by a pattern (`data/train-*.parquet`), or `hub:owner/name:split` (`hub:owner/name/folder:split`
    for one of several configurations)."""
    prompt_key: str | None = None
    """The key of a line's prompt; null = by the line's own keys."""
    answer_key: str | None = None
    """The key of a line's answer; null = by the line's own keys, and a line may have none."""
    demonstration_key: str | None = None
    """The key of a reply to imitate (`algo.sampling.source=demonstrations`, `algo=opsd`), in a conversation that of the
    prompt; null = by the line's own keys, or none if `prompt_key` is given."""
    train_turns: Literal["last", "all"] = "last"
    """The assistant's messages in a conversation that are replies to imitate; `all`: each is a task of its own."""
    image_folder: str | None = None
    """The folder of pictures that rows name by path; null = the folder of the row's file."""
    fetch_images: bool = False
    """Fetch pictures that rows name by a web address, each once at the start."""
    grader: str | dict[str, Any] = "exact"
    """`exact`, `numeric`, `math_verify`, or a function of yours."""

    @field_validator("grader")
    @classmethod
    def _known(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        grader_of(value)
        return value

    def origin(self, place: str) -> Origin:
        """Return the places of the pictures of a row, which stands at a `place` (`<file>, line 3`)."""
        folder = Path(self.image_folder or Path(place.rpartition(", ")[0]).parent)
        return Origin(folder.expanduser(), self.fetch_images)

    answer_types: ClassVar[tuple[type, ...]] = (str, int, float)
    """Types that a row's answer may have."""

    @functools.cached_property
    def grade(self) -> Grade:
        """The grader."""
        return grader_of(self.grader)

    def graded_answer(self, answer: Any, row: dict[str, Any]) -> str:
        """Return what of a row's answer replies are graded against."""
        return str(answer)

    def fault_of(self, answer: str) -> str | None:
        """Return why no reply can be graded against `answer`; None if one can."""
        return fault_of(answer, self.grader)


class JsonlTask(AnswerTask[JsonlData]):
    """A hash of the row is its identity."""

    settings: JsonlConfig

    @property
    def ungraded(self) -> str | None:
        """Why no reply can be graded; None if it can."""
        if _gradable(self.settings, self.data):
            return None
        return f"{self.data._place} has no answer, which grader={self.settings.grader} reads"

    def grade(self, reply: str) -> float:
        return 0.0 if self.ungraded else float(self.settings.grade(reply, self.data.answer))


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
    every, held_out = read(config, config.path), [] if config.eval_path is None else read(config, config.eval_path)
    name_by_pixels([*every, *held_out], is_divided=bool(held_out or config.eval_fraction))
    rows = [(row._conversation, row) for row in every]
    prompts = {prompt for prompt, row in rows if _gradable(config, row)}
    if config.eval_path is not None:
        chosen = {row._conversation for row in held_out}
    else:
        chosen = set(config.held_out(prompts))
        held_out = [row for prompt, row in rows if prompt in chosen]
    if config.split == "eval":
        if not held_out and prompts:
            raise ValueError("no prompt is held out: set eval_path or eval_fraction, or the env's eval_args to null")
        yield from (row for row in held_out if _gradable(config, row))
        return
    yield from (row for prompt, row in rows if prompt not in chosen)


def name_by_pixels(rows: Sequence[JsonlData], *, is_divided: bool) -> None:
    """Have prompts with equal texts be equal where the pixels of their pictures are, if rows `is_divided` into splits.

    A picture may be in two files, and two pictures have one name in two folders.
    """
    shown = [row for row in rows if row._opening is not None]
    texts = {row._place: _named(row._opening, lambda _: "") for row in shown}
    counts = Counter(texts.values())
    for row in shown:
        if is_divided and counts[texts[row._place]] > 1:
            row._conversation = _named(row._opening, functools.partial(pixels_at, origin=row._origin))
        row._opening = None


def _named(messages: list[Any], name: Callable[[str], str]) -> str:
    """Return a hash of messages with other names of their pictures than URLs and paths."""
    spelt = SPELT.encode(messages)
    for url in urls_of(messages):
        spelt = spelt.replace(json.dumps(url), json.dumps(name(url)))
    return _digest(spelt)


def pixels_at(url: str, origin: Origin) -> str:
    """Return the digest of a picture; its name for one on the web, or one that cannot be read, which `keep` refuses."""
    key = (_digest(url), origin.folder)
    if key not in PIXELS:
        try:
            PIXELS[key] = digest_of(decode(url, MAX_PIXELS, Origin(origin.folder)))
        except PictureError:
            return url
    return PIXELS[key]


def urls_of(prompt: Any) -> list[str]:
    """Return the URLs and paths of the pictures in a prompt, in their order."""
    messages = [] if isinstance(prompt, str) else prompt
    listed = [message.content for message in messages if isinstance(message.content, list)]
    return [part.image_url.url for content in listed for part in content if hasattr(part, "image_url")]


def _gradable(config: JsonlConfig, row: JsonlData) -> bool:
    """Return whether replies to a row can be graded: prl's graders compare with an answer, one of yours need not."""
    return bool(row.answer) or not (isinstance(config.grader, str) and config.grader in GRADERS)


def read(config: JsonlConfig, path: str) -> list[JsonlData]:
    """Return the distinct rows of a file or a data set; raise ValueError naming file, line and key of a bad one."""
    distinct: dict[str, JsonlData] = {}
    notes: Notes = defaultdict(list)
    for place, row in rows_at(path):
        for data in tasks_of(config, row, place, notes):
            distinct.setdefault(str(data.id), data)
    for note, places in notes.items():
        warnings.warn(f"{places[0]}, the first of {len(places)} rows: {note}", stacklevel=2)
    if not distinct:
        raise ValueError(f"{path} has no rows{' that are not left out' if notes else ''}")
    return list(distinct.values())


def rows_at(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, of several or of a data set, each with its place; raise ValueError for a bad one."""
    local = Path(path).expanduser()
    files = sorted(local.parent.glob(local.name)) if "*" in local.name else [local]
    if path.startswith("hub:"):
        name, colon, split = path.removeprefix("hub:").rpartition(":")
        if not colon or name.count("/") < 1 or not split:
            raise ValueError(f"{path!r}: write hub:owner/name:split")
        files = hub_files(name, split)
    elif missing := missing_parts(files):
        warnings.warn(missing, stacklevel=2)
    for file in files:
        for place, row in rows_of(file):
            yield f"{file}, {place}", row


def tasks_of(config: JsonlConfig, row: Any, place: str, notes: Notes) -> Iterator[JsonlData]:
    """Yield the tasks of a row; raise ValueError, with its `place`, for a key that is missing or of a wrong type.

    `notes` gets what is left out of it.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row is a mapping of keys to values, got {type(row).__name__}")
    prompt, reply, is_conversation = _prompt_and_reply(config, row, place, notes)
    prompt, reply = _shown(prompt, reply, row, place)
    answer, graded = _answer(config, row, place)
    tools = (
        _listed(tools_of, _value(row, place, "tools", list), place, "tools") if row.get("tools") not in NO_TOOLS else []
    )
    pairs, every = [(prompt, reply)], config.train_turns == "all"
    if is_conversation:
        pairs, behind = divided(prompt, reply, every=every)
        if not pairs or (behind and graded and not every):  # then a reply to what is behind is graded
            pairs = [(prompt, None)]
        elif behind:
            notes["the messages behind the assistant's last one are left out"].append(place)
    # A key that a setting names means what the setting says.
    named = {str(key).partition(".")[0] for key in (config.prompt_key, config.answer_key, config.demonstration_key)}
    others = {key: value for key, value in row.items() if key not in named}
    is_answer = answer is not None and pairs[-1][1] == str(answer)
    if pairs[-1][1] is not None and not is_answer and any(others.get(key) in FALSE for key in IS_GOOD):
        notes["rows whose `label` is false are left out: their replies are not to be imitated"].append(place)
        return
    for key in UNREAD.keys() & others.keys():
        if others[key] not in NO_TOOLS:
            notes[f"`{key}` is not read: {UNREAD[key]}"].append(place)
    own_system = _own_system(config, others, pairs[0][0], place, notes)
    pairs = [(opening, _imitated(reply, place, notes)) for opening, reply in pairs]
    first = _digest(pairs[0][0])
    identity = first if prompt is pairs[0][0] and isinstance(prompt, list) else prompt  # to spell messages takes long
    for number, (opening, demonstration) in enumerate(pairs, start=1):
        last = number == len(pairs)
        if demonstration == [] and not (last and graded):
            continue
        data = JsonlData(
            id=_digest([identity, answer, reply, *tools, *filter(None, [own_system]), *([] if last else [number])]),
            prompt=opening,
            system_prompt=own_system if config.system is None else config.system,
            answer=graded if last else "",
            demonstration=None if demonstration == [] else demonstration,
            tools=tools or None,
        )
        data._place, data._conversation, data._origin = place, first, config.origin(place)
        data._opening = pairs[0][0] if urls_of(pairs[0][0]) else None
        yield data


def _own_system(config: JsonlConfig, row: dict[str, Any], opening: Any, place: str, notes: Notes) -> str | None:
    """Return the system message that stands in a row beside its prompt; None where there is none or another counts."""
    key = next((key for key in SYSTEMS if row.get(key) not in (None, "")), None)
    if key is None:
        return None
    system = _value(row, place, key, str)
    other = config.system
    if other is None and isinstance(opening, list) and opening[0].role == "system":
        other = opening[0].content
    if other not in (None, system):
        notes[f"`{key}` is left out: there is another system message"].append(place)
    return system if other is None else None


def _imitated(reply: Any, place: str, notes: Notes) -> Any:
    """Return a reply to imitate as tasks have it; raise ValueError, with the place, for a message that says nothing."""
    if not isinstance(reply, list):
        return reply
    # A picture in a message of the user's has no place in a reply.
    messages = [message_to_wire(message) for message in reply if not isinstance(message.content, list)]
    if not messages:
        notes["messages of the assistant's with `weight` 0 or `train` false are not imitated"].append(place)
    elif not any(message.get(key) for message in messages for key in SAID):
        raise ValueError(f"{place}: the assistant's message to imitate is empty: neither a text nor a call of a tool")
    return messages


def _prompt_and_reply(config: JsonlConfig, row: dict[str, Any], place: str, notes: Notes) -> tuple[Any, Any, bool]:
    """Return a row's prompt, the reply to imitate or None, and whether these are a conversation that is to be divided.

    Both are a text or messages.
    """
    prompt_key, reply_key = config.prompt_key, config.demonstration_key
    if prompt_key is None:
        found = layout_of(row)
        if found is None:
            keys = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{place}: no layout of rows fits its keys ({keys}): name its prompt with prompt_key")
        prompt_key, reply_key = found[0], reply_key or found[1]
    if reply_key == "chosen" and row.get("rejected") is not None:
        notes["`chosen` is imitated, and `rejected` is left out: prl trains on no pairs"].append(place)
    if prompt_key == reply_key:
        return _listed(messages_of, _value(row, place, prompt_key, list), place, prompt_key), None, True
    prompt = _listed(messages_of, _value(row, place, prompt_key, str, list), place, prompt_key)
    if config.prompt_key is None and prompt_key == "instruction" and row.get("input"):
        prompt = f"{prompt}\n\n{_value(row, place, 'input', str)}"
    if reply_key is None:
        return prompt, None, False
    reply = _listed(messages_of, _value(row, place, reply_key, str, list, int, float), place, reply_key)
    named = config.demonstration_key is not None
    return prompt, reply, not named and (isinstance(prompt, list) or isinstance(reply, list))


def _shown(prompt: Any, reply: Any, row: dict[str, Any], place: str) -> tuple[Any, Any]:
    """Return a row's prompt and reply with its pictures in them, as they are where it has none.

    Raises ValueError, with the place, where the pictures do not fit the messages.
    """
    opening = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
    behind = reply if isinstance(reply, list) else []
    try:
        urls = urls_in(row)
        if not urls and not any(isinstance(message.content, list) for message in [*opening, *behind]):
            return prompt, reply
        messages = with_pictures([*opening, *behind], urls)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    count = len(opening)
    return messages[:count], messages[count:] if isinstance(reply, list) else reply


def _listed(read_list: Callable[[Any], list[Any]], value: Any, place: str, key: str) -> Any:
    """Return what is read in a list, and any other value as text; raise ValueError, with place and key, if it fails."""
    try:
        return read_list(value) if isinstance(value, list) else str(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wanted = "chat messages" if read_list is messages_of else "tools in OpenAI's format"
        raise ValueError(f"{place}: key {key!r} is no list of {wanted}: {in_one_line(error)}") from error


def _answer(config: JsonlConfig, row: dict[str, Any], place: str) -> tuple[Any, str]:
    """Return a row's answer as it is, and what of it replies are graded against; None and nothing where it has none."""
    key = config.answer_key or next((known for known in ANSWERS if _lookup(row, known) is not None), None)
    if key is None:
        return None, ""
    answer = _value(row, place, key, *config.answer_types)
    graded = config.graded_answer(answer, row)
    if (fault := config.fault_of(graded)) is not None:
        raise ValueError(f"{place}: key {key!r} {fault}, got {answer!r:.80}")
    return answer, graded


def _lookup(row: Any, key: str) -> Any:
    """Return the value of a key, which may be nested (`reward_model.ground_truth`); None where there is none."""
    outer, _, inner = key.partition(".")
    if isinstance(row, dict) and key not in row and inner:
        return _lookup(row.get(outer), inner)
    return row.get(key) if isinstance(row, dict) else None


def _value(row: dict[str, Any], place: str, key: str, *types: type) -> Any:
    outer, _, inner = key.partition(".")
    if key not in row and inner and isinstance(row.get(outer), dict):  # reward_model.ground_truth
        return _value(row[outer], f"{place}, {outer!r}", inner, *types)
    if key not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{place}: there is no {key!r} (its keys: {keys})")
    try:
        value = decoded(row[key], whole=types == (list,)) if list in types else row[key]
    except ValueError as error:
        raise ValueError(f"{place}: key {key!r}: {error}") from error
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
