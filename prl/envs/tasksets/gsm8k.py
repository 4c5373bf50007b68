"""Grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168): the prompt is the question, the answer a number.

The reward of a reply is 1.0 if the number it gives (`prl.envs.tasksets.numbers`) is the answer, else 0.0. So the
answer 1234 grades `#### 1,234`, `That is $1,234.00.` and `\\boxed{1234} in 2 days` 1.0, and `1,234 or 5`, `1234.5` and
`-1234` 0.0.
With `grader=math_verify` it is 1.0 if math-verify finds the reply equal to the answer.

The problems come from `path`, or from the hub's `openai/gsm8k`. The eval split is the data set's test split; of a
single file, which has none, one problem in ten is held out, by content.
"""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import AnswerTask, SplitConfig
from prl.envs.tasksets.files import hub_files, rows_of
from prl.envs.tasksets.graders import GRADERS, QUICK
from prl.envs.tasksets.numbers import final_number, in_decimal

__all__ = ["GSM8KTaskset"]

HUB = "openai/gsm8k/main"
SUFFIXES = (".jsonl", ".parquet")


class GSM8KData(vf.TaskData):
    answer: str
    """The number that a reply must give, in decimal."""
    demonstration: str
    """The data set's worked solution, shown to a reference model by `opsd`; not part of the prompt."""


class GSM8KTask(AnswerTask[GSM8KData]):
    """A hash of the question is its identity."""

    grader: str

    def grade(self, reply: str) -> float:
        return GRADERS[self.grader](reply, self.data.answer)


class GSM8KConfig(SplitConfig):
    num_tasks: int | None = Field(None, ge=1)  # type: ignore[assignment]  # in other envs there is no "all"
    """How many problems; null = all."""
    path: str | None = None
    """A .jsonl or .parquet file, with the columns `question` and `answer` (the number after `####`), or a folder of
    train*.jsonl and test*.jsonl (or .parquet); null = the hub's `openai/gsm8k`."""
    grader: Literal["numeric", "math_verify"] = "numeric"
    """Whether the number that a reply gives is compared, or what the library math-verify makes of the reply."""


class GSM8KTaskset(vf.Taskset[GSM8KTask, GSM8KConfig]):
    """The data set's problems, each once, in random order."""

    @property
    def IN_PROCESS(self) -> bool:
        return self.config.grader in QUICK

    def load(self) -> Iterator[GSM8KTask]:
        config = self.config
        rows = split_rows(config)
        random.Random(config.seed).shuffle(rows)
        for data in rows[: config.num_tasks]:
            task = GSM8KTask(data, config.task)
            task.grader = config.grader
            yield task


def split_rows(config: GSM8KConfig) -> list[GSM8KData]:
    """Return the distinct problems of a split with their solutions; raise ValueError if they cannot be read."""
    source = None if config.path is None else Path(config.path).expanduser()
    if source is not None and not source.is_dir():
        if source.suffix not in SUFFIXES or not source.is_file():
            raise ValueError(f"path={config.path!r} is neither a .jsonl or .parquet file nor a folder of them")
        return [row for row in read([source]).values() if config.in_split(row.prompt)]
    test = read(files_of("test", source))
    if config.split == "eval":
        return list(test.values())
    return [row for row in read(files_of("train", source)).values() if row.prompt not in test]


def files_of(part: str, folder: Path | None) -> list[Path]:
    """Return the files of `part` in a folder or its `main/`, where the hub has them; without a folder, from the hub."""
    if folder is None:
        return hub_files(HUB, part)
    for place in (folder, folder / "main"):
        files = sorted(file for file in place.glob(f"{part}*") if file.suffix in SUFFIXES)
        if files:
            return files
    raise ValueError(f"path={str(folder)!r} has no {part}*.jsonl and no {part}*.parquet")


def read(files: list[Path]) -> dict[str, GSM8KData]:
    """Read the problem of each row, by its question; raise ValueError naming the file and row that cannot be used."""
    problems: dict[str, GSM8KData] = {}
    for file in files:
        for number, (_, row) in enumerate(rows_of(file), start=1):
            question, answer = (row.get(key) if isinstance(row, dict) else None for key in ("question", "answer"))
            value = final_number(answer, alone=True) if isinstance(answer, str) else None
            if not isinstance(question, str) or value is None:
                raise ValueError(
                    f"{file}, row {number}: a row needs a `question`, and an `answer` that is a single number or ends "
                    "with one after `####`"
                )
            digest = hashlib.sha256(question.encode()).hexdigest()[:16]
            data = GSM8KData(id=digest, prompt=question, answer=in_decimal(value), demonstration=answer)
            problems.setdefault(question, data)
    return problems
