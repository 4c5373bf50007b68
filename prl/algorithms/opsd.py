"""On-policy self-distillation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from prl.algorithms.base import Algorithm
from prl.algorithms.reference import IN_TRAINER, ReferenceOptions
from prl.base.errors import ConfigError, PrlError
from prl.base.text import in_one_line
from prl.engines.renderer import make_renderer, renderer_config, tokenizer_of
from prl.rollouts.rollout import Rollout

TEMPLATE = (
    "Here is an example of a response to the question:\n{demonstration}\n\nNow answer with a response of your own."
)

PROBE = "demonstration-7e1"
"""Demonstration that stands in for a real one, to see whether a chat template shows it."""
LONGEST = 16  # demonstrations to measure, the longest by characters: the longest in tokens is among them


@dataclass(kw_only=True)
class OPSDAlgorithm(ReferenceOptions, Algorithm):
    """Reverse KL to the live policy shown a demonstration, on every sampled token; assigns no advantage.

    The hint is one leading system message. The reference scores the hint and the rollout's tokens verbatim, and the
    hint's part is cut off again, so a rollout may have any number of turns. Rollouts are kept so short that the hint
    fits into `model.max_model_len` as well. Source: self-distillation fine-tuning (arXiv 2601.19897).
    """

    action_loss_type: ClassVar[str] = "ref_kl"
    reads_reward: ClassVar[bool] = False

    reference: Literal["policy", "initial", "ema", "lagged"] = "policy"
    """Model that gets the demonstration: `policy`, which scores rollouts by prefill, or a model in the trainer:
    `initial` (the run's first weights), `ema` (a running mean of the policy, see `decay`) or `lagged` (the policy of up
    to `every` steps ago)."""
    demo_key: str = "demonstration"
    """Key of a rollout's demonstration in its `info`, else the task's field of this name."""
    template: str = TEMPLATE
    """The hint; {demonstration} is replaced by the demonstration."""
    renderer: str = "auto"
    """Renderer of the hint, over the policy's tokenizer; `auto` = the run's own."""
    max_concurrent: Annotated[int, Ge(1)] = 32
    """Scoring requests in flight."""

    def check(self, where: str) -> None:
        self.check_read(where, self.reference)
        if "{demonstration}" not in self.template:
            raise ConfigError(f"{where}.template must contain {{demonstration}} where the demonstration goes")
        renderer_config(self.renderer, {}, where=f"{where}.renderer", name_key=f"{where}.renderer")

    def attach(self, **live: Any) -> None:
        super().attach(**live)
        self.hint_renderer = self.policy_renderer
        if self.renderer != "auto":
            key = f"{type(self).__name__}.renderer"
            tokenizer = tokenizer_of(self.policy_renderer)
            if tokenizer is None:
                raise PrlError(f"{key}={self.renderer}: the run's renderer does not keep its tokenizer; choose auto")
            self.hint_renderer = make_renderer(tokenizer, name=self.renderer, name_key=key)
        self._check_hint()
        self.policy_scorer = self.scorer(self.policy_pool, self.max_concurrent)

    def _check_hint(self) -> None:
        """Raise ConfigError where the chat template shows no hint: the reference would be the policy itself."""
        tokenizer = tokenizer_of(self.hint_renderer)
        try:
            shown = PROBE if tokenizer is None else tokenizer.decode(self._hint(PROBE))
        except Exception as error:  # of a chat template, which is a program
            shown = in_one_line(error)
        if PROBE not in shown:
            raise ConfigError(
                f"{type(self).__name__}: the chat template does not show the hint, a system message alone, but "
                f"{shown!r:.200}: choose a renderer that takes one with algo.renderer"
            )

    def reserve(self, tasks: Sequence[Any]) -> int:
        demonstrations = [getattr(task.data, self.demo_key, None) for task in tasks]
        try:
            texts = [self._words(demonstration) for demonstration in demonstrations if demonstration]
        except ValueError as error:
            raise ConfigError(f"algo.demo_key={self.demo_key}: {error}") from error
        longest = sorted(texts, key=len)[-LONGEST:]
        return max((len(self._hint(demonstration)) for demonstration in longest), default=0)

    def trainer_references(self) -> set[str]:
        return super().trainer_references() | {self.name_in_trainer(self.reference)} - {""}

    async def score_rollout(self, rollout: Rollout) -> None:
        task = rollout.task.data
        # An env may have made one for this episode, which then goes before that of the task.
        demonstration = rollout.trace.info.get(self.demo_key) or getattr(task, self.demo_key, None)
        try:
            hint = self._hint(self._words(demonstration))
        except ValueError as error:
            missing = (
                f"no {self.demo_key!r} to show, in info or as a field of task {task.id or task.idx} of env "
                f"{rollout.env_name!r}: {error} (algo.demo_key names the field)"
            )
            rollout.fail(ValueError(missing), "env")
            return
        self.name_reference(rollout.samples, self.reference, prefix=hint)
        if self.reference not in IN_TRAINER:
            await self.policy_scorer.compute(rollout, context=hint)

    def _words(self, demonstration: Any) -> str:
        """The replies of the demonstration as a text. Raises ValueError where it has none."""
        from prl.engines.chat import replies_of, words_of  # it imports verifiers

        return words_of(replies_of(demonstration, self.demo_key))

    def _hint(self, demonstration: str) -> list[int]:
        """Render the system message that shows the demonstration. Returns its tokens."""
        message = {"role": "system", "content": self.template.replace("{demonstration}", demonstration)}
        return list(self.hint_renderer.render_ids([message], add_generation_prompt=False))
