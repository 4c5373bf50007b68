"""A line of a rollout file. Importing this loads neither torch nor verifiers."""

from typing import Any

import msgspec

from prl.rollouts.inputs import Picture
from prl.rollouts.rollout import Outcome, Stage


class ToolCall(msgspec.Struct):
    """A call as the model wrote it."""

    name: str
    arguments: str = ""


class Message(msgspec.Struct, omit_defaults=True):
    """A message of a trace. Fields at their default are left out of the file."""

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    name: str | None = None
    """The tool that answers."""
    after: int | msgspec.UnsetType | None = msgspec.UNSET
    """Position (from 0) of the message that it follows; null where it opens a history. Left out where it follows the
    message before it."""
    sampled: bool = True
    """False for an assistant message that the model was shown and did not sample here."""
    pictures: list[tuple[int, str]] = []
    """The pictures in it: the place in `content` (characters from 0) before which each stands, and its digest."""


class Record(msgspec.Struct, kw_only=True):
    """One rollout as plain data. What has a default may be missing in the file of an older run."""

    step: int
    env: str
    agent: str = "agent"
    task: Any = None
    group: int
    rollout: int = 0
    """The episode's place in its group."""
    reward: float | None
    rewards: dict[str, float | None] = {}
    metrics: dict[str, float | None] = {}
    advantage: float | None = None
    start_version: int | None = None
    end_version: int | None = None
    outcome: Outcome | None = None
    """Null for a rollout of an evaluation unless it failed."""
    matched: dict[str, str] = {}
    """Filter slot -> the filter that matched, enforced or not."""
    info: dict[str, Any] = {}
    """Values that the env's code left in the trace's `info`, a judge's verdict say; long ones are cut."""
    difficulty_pool: str | None = None
    """The pool that its group moved the task to, or left it in."""
    stop: str | None = None
    completion_tokens: int = 0
    samples: int = 1
    pictures: list[Picture] | msgspec.UnsetType = msgspec.UNSET
    """The pictures that model calls were sent, each once, with their places in the first of these calls."""
    messages: list[Message]
    """Every message of the trace once, on whichever branch, in order."""

    @property
    def stage(self) -> Stage | None:
        """The stage of its outcome; None for a rollout of an evaluation that did not fail."""
        return None if self.outcome is None else self.outcome.stage

    def content_of(self, message: Message) -> str:
        """Return the content of one of its messages, each picture named in its place."""
        text, end = "", 0
        for place, digest in message.pictures:
            text += f"{message.content[end:place]}[{self.picture(digest)}]"
            end = place
        return text + message.content[end:]

    def picture(self, digest: str) -> str:
        """Return the name of a picture: `picture 1f3c9a2b 48x48`; without its size where no model was sent it."""
        sizes = [f" {each.width}x{each.height}" for each in self.pictures or () if each.digest == digest]
        return f"picture {digest[:8]}{''.join(sizes[:1])}"
