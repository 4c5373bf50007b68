"""Any generator of the reasoning-gym package, by name: the prompt is its question, the grader its own `score_answer`.

    State the final answer to the following arithmetic problem: 12 + 34 =    46

The content of the last <answer></answer> of the reply is graded, else the whole reply, without surrounding whitespace.
The reward is the scorer's, in [0, 1]; many give partial credit to a wrong answer (`chain_sum` grades `46` and `046.0`
1.0, `46!` 0.6667, `about 46` 0.25 and `47` 0.0). A reply for which a scorer raises an exception earns 0.0.

Some of the package's scorers must not be given arbitrary model output:

    REFUSED     they parse it with sympy, which evaluates it as Python, or accept an answer to another question
    EXACT       the same, but an answer can be written in one way only: it is compared with the package's, 1.0 or 0.0
    NUMERIC     its last number is graded, as `grader=numeric` of `jsonl` does: 1.0 or 0.0
    HARMLESS    they `eval` a reply that is not the answer, or hang on a long number: a reply with other characters than
                an answer's earns 0.0 without being scored. What is left are lists of literals, and sums of integers

Questions are the same in every Python process, except for four generators that iterate over sets, unless PYTHONHASHSEED
is set: `isomorphic_strings`, `polynomial_multiplication`, `ransom_note`, `word_ladder`. The splits are by content
anyway.
"""

import copy
import difflib
import hashlib
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, field_validator
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset

from prl.envs.tasksets.base import AnswerTask, SplitConfig
from prl.envs.tasksets.graders import numeric

__all__ = ["ReasoningGymTaskset"]

REFUSED = {
    "composite": "it mixes others: choose those, as envs of their own",
    "simple_integration": "its scorer evaluates the reply as Python (sympy.parse_expr)",
    "intermediate_integration": "its scorer evaluates the reply as Python (sympy.parse_expr)",
    "puzzle24": "its scorer evaluates the reply as Python (sympy.parse_expr), and takes any numbers that make 24",
}
EXACT = {
    "polynomial_multiplication",
    "coin_flip",  # its scorer gives `0` full credit
    "game_of_life_halting",  # its scorer gives any reply full credit
}
NUMERIC = {"gsm_symbolic"}  # its scorer takes the first number of a reply that has several
HARMLESS = {
    "binary_matrix": re.compile(r"[0-9,\[\]\s]*"),
    "spiral_matrix": re.compile(r"[-0-9,\[\]\s]*"),
    "n_queens": re.compile(r"[Q_,'\"\[\]\s]*"),
    "string_insertion": re.compile(r"[A-E,'\"\[\]\s]*"),
    "countdown": re.compile(r"(?:[-0-9+/() ]|\*(?!\*)){0,300}"),
    "complex_arithmetic": re.compile(r"[-0-9+.ij() ]*"),  # no `nan`: comparisons with its distance are false
    "rubiks_cube": re.compile(r"(?:[A-Za-z'\s]|[0-9](?![0-9]))*"),  # `R9999999` would be that many turns
    "propositional_logic": re.compile(r"[^¬]*(?:¬[^¬]*){0,100}"),  # the scorer is quadratic in the negations
}
CHOKED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""Exceptions of a scorer for a reply that its author did not foresee."""
CHUNK = 500
"""Questions of one generator seed."""


def tagged(reply: str) -> str | None:
    """Return the content of the last <answer></answer>; None if there is none.

    The same as the package's `extract_answer`, but linear: that one searches from every <answer> to the end of the
    reply.
    """
    closed = reply.split("</answer>")[:-1]
    answers = [part.partition("<answer>")[2] for part in closed if "<answer>" in part]
    return answers[-1].strip() if answers else None


def grade(reply: str, name: str, dataset: ProceduralDataset, entry: dict[str, Any]) -> float:
    """Return the reward of `reply` to the `entry` of generator `name`, in [0, 1], as above."""
    in_tags = tagged(reply)
    answer = reply.strip() if in_tags is None else in_tags
    if name in EXACT:
        return float(answer.split() == entry["answer"].split())
    if name in NUMERIC:
        return numeric(answer, entry["answer"])
    if name in HARMLESS and not HARMLESS[name].fullmatch(answer):
        return 0.0
    try:
        # A copy, because some scorers write into the entry.
        reward = float(dataset.score_answer(answer, copy.deepcopy(entry)))
    except CHOKED:
        return 0.0
    return min(max(reward, 0.0), 1.0) if math.isfinite(reward) else 0.0


class ReasoningGymData(vf.TaskData):
    answer: str | None
    """The package's answer; None if it has a checker only."""


class ReasoningGymTask(AnswerTask[ReasoningGymData]):
    """The generator and a hash of the question are its identity."""

    def __init__(self, data, config, name: str, dataset: ProceduralDataset, entry: dict[str, Any]):
        super().__init__(data, config)
        self._graded_by = (name, dataset, entry)

    # Reward and metric grade the same reply, with other replies in between.
    @lru_cache(maxsize=64)  # noqa: B019  # holds 64 tasks at most
    def grade(self, reply: str) -> float:
        return grade(reply, *self._graded_by)


class ReasoningGymConfig(SplitConfig):
    """Options of `reasoning_gym`. Of ten questions that the generator makes, one belongs to the eval split."""

    dataset: str = "chain_sum"
    """The generator's name."""
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of generators, by name. Those of generators other than `dataset` are not used."""

    @field_validator("dataset")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=5) or sorted(DATASETS)
            raise ValueError(f"no generator {name!r}; there are {', '.join(near)}")
        if name in REFUSED:
            raise ValueError(f"{name} is left out: {REFUSED[name]}")
        return name

    @field_validator("config")
    @classmethod
    def _all_known(cls, config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in config:
            cls._known(name)
        return config


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    """Questions of one generator, each once."""

    IN_PROCESS = True

    def load(self) -> Iterator[ReasoningGymTask]:
        config, name = self.config, self.config.dataset
        mine = ((dataset, entry) for dataset, entry in self._entries(name) if config.in_split(entry["question"]))
        for dataset, entry in islice(mine, config.num_tasks):
            digest = hashlib.sha256(entry["question"].encode()).hexdigest()[:16]
            data = ReasoningGymData(id=f"{name}/{digest}", prompt=entry["question"], answer=entry["answer"])
            yield ReasoningGymTask(data, config.task, name, dataset, entry)

    def _entries(self, name: str) -> Iterator[tuple[ProceduralDataset, dict[str, Any]]]:
        """Yield distinct questions of both splits, until a whole chunk has no new one."""
        seen: set[str] = set()
        for chunk in count():
            # With seed + 1 the package makes the same questions shifted by one: a hash spreads neighbouring seeds.
            seed = int(hashlib.sha256(f"{self.config.seed}/{chunk}".encode()).hexdigest()[:7], 16)
            known = len(seen)
            dataset = create_dataset(name, **self.config.config.get(name, {}), seed=seed, size=CHUNK)
            for index in range(CHUNK):
                try:
                    entry = dataset[index]
                except Exception as error:
                    raise ValueError(f"{name} cannot generate with these settings: {error}") from error
                if entry["question"] not in seen:
                    seen.add(entry["question"])
                    yield dataset, entry
            if len(seen) == known:
                return
