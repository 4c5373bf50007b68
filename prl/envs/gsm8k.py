"""Grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168): the prompt is the question, the answer a number.

The reward of a reply is 1.0 if the number it gives is the answer, else 0.0. The number is the first one after the last
`####` or `\\boxed{` of the reply, or, if there is neither, the last in the reply. `$` and thousands separators are
ignored, `.5` is 0.5, and numbers are compared exactly, as decimals. So the answer 1234 grades `#### 1,234`,
`That is $1,234.00.` and `\\boxed{1234} in 2 days` 1.0, and `1,234 or 5`, `1234.5` and `-1234` 0.0.

The problems come from `path`, or from the hub's `openai/gsm8k`. The eval split is the data set's test split; of a
single file, which has none, one problem in ten is held out, by content.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.base import AnswerTask, SplitConfig
from prl.envs.files import hub_files, rows_of

__all__ = ["GSM8KTaskset"]

HUB = "openai/gsm8k/main"
MARK = re.compile(r"####|\\boxed\{")
# A minus after a digit, a letter or a bracket is a subtraction: 10-5.
# A point after one of these ends a sentence or is one of several; it does not start a number.
NUMBER = re.compile(
    r"(?:(?<![\w).])-)?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w).])\.[0-9]+)"
)
SUFFIXES = (".jsonl", ".parquet")


def final_number(text: str) -> Decimal | None:
    """Return the number that `text` gives as its answer, as above; None if it gives none."""
    *before, tail = MARK.split(text.replace("{,}", ","))  # LaTeX's thousands separator
    numbers = NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal(numbers[0 if before else -1].replace("$", "").replace(",", ""))


def grade(reply: str, answer: str) -> float:
    """Return 1.0 if `reply` gives the number `answer`, else 0.0."""
    return float(final_number(reply) == Decimal(answer))


class GSM8KData(vf.TaskData):
    answer: str
    """The number that a reply must give, in decimal."""
    demonstration: str
    """The data set's worked solution, shown to a reference model by `opsd`; not part of the prompt."""


class GSM8KTask(AnswerTask[GSM8KData]):
    """A hash of the question is its identity."""

    def grade(self, reply: str) -> float:
        return grade(reply, self.data.answer)


class GSM8KConfig(SplitConfig):
    num_tasks: int | None = Field(None, ge=1)  # type: ignore[assignment]  # in other envs there is no "all"
    """How many problems; null = all."""
    path: str | None = None
    """A .jsonl or .parquet file, with the columns `question` and `answer` (the number after `####`), or a folder of
    train*.jsonl and test*.jsonl (or .parquet); null = the hub's `openai/gsm8k`."""


class GSM8KTaskset(vf.Taskset[GSM8KTask, GSM8KConfig]):
    """The data set's problems, each once, in random order."""

    IN_PROCESS = True

    def load(self) -> Iterator[GSM8KTask]:
        config = self.config
        rows = split_rows(config)
        random.Random(config.seed).shuffle(rows)
        for question, solution in rows[: config.num_tasks]:
            digest = hashlib.sha256(question.encode()).hexdigest()[:16]
            number = format(final_number(solution), "f")
            yield GSM8KTask(GSM8KData(id=digest, prompt=question, answer=number, demonstration=solution), config.task)


def split_rows(config: GSM8KConfig) -> list[tuple[str, str]]:
    """Return the distinct problems of a split with their solutions; raise ValueError if they cannot be read."""
    source = None if config.path is None else Path(config.path).expanduser()
    if source is not None and not source.is_dir():
        if source.suffix not in SUFFIXES or not source.is_file():
            raise ValueError(f"path={config.path!r} is neither a .jsonl or .parquet file nor a folder of them")
        return [row for row in read([source]).items() if config.in_split(row[0])]
    test = read(files_of("test", source))
    if config.split == "eval":
        return list(test.items())
    return [row for row in read(files_of("train", source)).items() if row[0] not in test]


def files_of(part: str, folder: Path | None) -> list[Path]:
    """Return the files of `part` in a folder or its `main/`, where the hub has them; without a folder, from the hub."""
    if folder is None:
        return hub_files(HUB, part)
    for place in (folder, folder / "main"):
        if found := sorted(file for file in place.glob(f"{part}*") if file.suffix in SUFFIXES):
            return found
    raise ValueError(f"path={str(folder)!r} has no {part}*.jsonl and no {part}*.parquet")


def read(files: list[Path]) -> dict[str, str]:
    """Read question and solution of each row; raise ValueError naming the file and row that cannot be used."""
    problems: dict[str, str] = {}
    for file in files:
        for number, (_, row) in enumerate(rows_of(file), start=1):
            question, answer = (row.get(key) if isinstance(row, dict) else None for key in ("question", "answer"))
            if not isinstance(question, str) or not isinstance(answer, str) or final_number(answer) is None:
                raise ValueError(f"{file}, row {number}: a row needs a `question`, and an `answer` with a number in it")
            problems.setdefault(question, answer)
    return problems
