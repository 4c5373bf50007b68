"""Grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168): the prompt is the question, the answer a number.

The reward of a reply is 1.0 if the number it gives (`prl.envs.tasksets.numbers`) is the answer, else 0.0. So the
answer 1234 grades `#### 1,234`, `That is $1,234.00.` and `\\boxed{1234} in 2 days` 1.0, and `1,234 or 5`, `1234.5` and
`-1234` 0.0.
With `grader=math_verify` it is 1.0 if math-verify finds the reply equal to the answer.

It is `prl.envs.tasksets.jsonl` with the data set's keys: the problems come from the hub's `openai/gsm8k`, whose test
split is held out, or from `path`.
"""

from typing import Any, Literal, Self

import verifiers.v1 as vf
from pydantic import model_validator

from prl.envs.tasksets.jsonl import JsonlConfig, JsonlTask, JsonlTaskset
from prl.envs.tasksets.numbers import final_number, in_decimal

__all__ = ["GSM8KTaskset"]

HUB = "hub:openai/gsm8k/main"


class GSM8KConfig(JsonlConfig):
    path: str | None = None  # type: ignore[assignment]
    """As of `jsonl`, with the columns `question` and `answer` (a worked solution, the number after `####`); null = the
    hub's `openai/gsm8k`."""
    prompt_key: str | None = "question"
    answer_key: str | None = "answer"
    demonstration_key: str | None = "answer"
    grader: Literal["numeric", "math_verify"] = "numeric"
    """Comparison: of the number that a reply gives, or of what the library math-verify makes of the reply."""

    @model_validator(mode="after")
    def _from_the_hub(self) -> Self:
        if self.path is None:
            self.path = f"{HUB}:train"
            if self.eval_path is None:
                self.eval_path = f"{HUB}:test"
        return self

    def graded_answer(self, answer: Any, row: dict[str, Any]) -> str:
        """Return the number of a worked solution; what its grader refuses where it has none."""
        number = final_number(str(answer), alone=True)
        if number is None:
            return str(answer) if self.grader == "numeric" else ""
        return in_decimal(number)


class GSM8KTaskset(JsonlTaskset, vf.Taskset[JsonlTask, GSM8KConfig]):
    """The problems, each once, in random order."""

    IN_PROCESS = JsonlTaskset.IN_PROCESS
