"""On-policy self-distillation."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.errors import ConfigError
from prl.inference.sampling import SamplingConfig
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.opd import check_concurrency
from prl.orchestrator.algo.reference_logprobs import ReferenceLogprobs

if TYPE_CHECKING:
    from prl.rollouts.rollout import Rollout

TEMPLATE = (
    "Here is an example of a response to the question:\n{demonstration}\n\nNow answer with a response of your own."
)

LONGEST = 16  # of the tasks' demonstrations, by characters: the longest in tokens is among them


@dataclass
class OPSDConfig:
    """The policy is its own teacher, shown a demonstration."""

    _target_: str = "prl.orchestrator.algo.opsd.OPSDAlgorithm"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How rollouts are sampled. They are kept so short that the hint fits into `model.max_model_len` as well."""
    demo_key: str = "demonstration"
    """Where a rollout's demonstration stands: this key of its `info`, else the task's field of this name."""
    template: str = TEMPLATE
    """The hint, with {demonstration} where the demonstration goes."""
    renderer: str = "auto"
    """Renderer of the hint, over the policy's tokenizer; `auto` = the run's own."""
    max_concurrent: int = 32
    """Scoring requests in flight."""


class OPSDAlgorithm(Algorithm):
    """Every sampled token is pulled by the reverse KL to the live policy shown a demonstration; no advantage is assigned.

    The hint is one leading system message. The reference scores the hint and the rollout's tokens verbatim, and the hint's
    part is cut off again, so any number of turns will do. Source: self-distillation fine-tuning (arXiv 2601.19897).
    """

    action_loss_type = "ref_kl"

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        super().check(config, where)
        check_concurrency(config, where)
        if "{demonstration}" not in config.template:
            raise ConfigError(f"{where}.template must say {{demonstration}} where the demonstration goes")
        if config.renderer != "auto":
            from prl.inference.renderer import renderer_config

            renderer_config(config.renderer, {}, f"{where}.renderer")

    @classmethod
    def check_tasks(cls, config: Any, where: str, tasks: Sequence[Any]) -> None:
        if not any(getattr(task.data, config.demo_key, None) for task in tasks):
            warnings.warn(
                f"{where}.demo_key={config.demo_key}: no task has that field, so that a rollout fails unless its env puts a "
                "demonstration into `info`",
                stacklevel=2,
            )

    def __init__(self, config: Any, **resources: Any):
        super().__init__(config, **resources)
        if config.renderer != "auto":
            from prl.inference.renderer import make_renderer

            self.renderer = make_renderer(self.renderer._tokenizer, config.renderer, {})
        self.scorer = ReferenceLogprobs(self.policy_pool, config.max_concurrent)

    def reserve(self, tasks: Sequence[Any]) -> int:
        shown = sorted((str(getattr(task.data, self.config.demo_key, "")) for task in tasks), key=len)
        return max((len(self._hint(demonstration)) for demonstration in shown[-LONGEST:]), default=0)

    async def score_rollout(self, rollout: "Rollout") -> None:
        await self.scorer.score(rollout, context=self._hint(self._demonstration(rollout)))

    def _hint(self, demonstration: str) -> list[int]:
        """The tokens of the system message that shows the demonstration."""
        hint = self.config.template.replace("{demonstration}", demonstration)
        return self.renderer.render_ids([{"role": "system", "content": hint}], add_generation_prompt=False)

    def _demonstration(self, rollout: "Rollout") -> str:
        key, task = self.config.demo_key, rollout.task.data
        found = rollout.info.get(key) or getattr(task, key, None)
        if not found:
            raise ValueError(
                f"no {key!r} to show: neither info nor a field of task {task.id or task.idx} of env {rollout.env_name!r} holds "
                "one (algo.demo_key names the field)"
            )
        return str(found)
