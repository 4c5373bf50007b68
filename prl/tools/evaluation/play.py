"""An evaluation from its config: what can be refused, then each target on every env."""

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from renderers.base import Renderer

from prl.base.errors import ConfigError, PrlError
from prl.config.build import build, sampling_of
from prl.config.evaluation import EvaluationConfig
from prl.config.run_yaml import data_of
from prl.config.schema import ModelConfig
from prl.config.validate import check_device, check_env_models, check_env_name, check_run_name, validate_server
from prl.engines.client import ModelPool
from prl.engines.sampler import Sampler
from prl.engines.tokenizers import load_tokenizer
from prl.envs.environment import Environment, reason_ungraded
from prl.launch.checks import check_loadable
from prl.launch.components import renderer_of
from prl.launch.launcher import Launcher
from prl.launch.prompts import rendered_prompts
from prl.launch.specs import run_token
from prl.monitors.base import Monitor, Monitors
from prl.orchestrator.evaluate import evaluate_env
from prl.orchestrator.types import EvalEnv
from prl.runs.result import RunResult
from prl.tools.evaluation.scores import EnvScore, TaskScore, score_env, score_tasks
from prl.tools.evaluation.serving import serve_each
from prl.tools.evaluation.targets import Target, by_engine, find_targets


class TargetScore(msgspec.Struct, kw_only=True):
    """The scores of one target."""

    name: str
    step: int
    """Its place in `metrics.jsonl` and in the names of rollout files."""
    path: str
    """Its weights, or its endpoint."""
    envs: list[EnvScore] = []


class EvaluationResult(RunResult):
    """The content of an evaluation's `result.json`."""

    targets: list[TargetScore] = msgspec.field(default_factory=list)


@dataclass
class Evaluation:
    """An evaluation whose config has passed."""

    config: EvaluationConfig
    engines: list[list[Target]]
    """The targets that one engine after the other serves."""
    envs: list[EvalEnv]
    renderers: dict[tuple[str, str], Renderer]
    """By target and env."""
    monitors: Monitors
    run_dir: Path
    result: EvaluationResult = field(default_factory=EvaluationResult)
    base: dict[str, list[TaskScore]] = field(default_factory=dict)
    """By env, of the first target."""

    async def run(self) -> None:
        """Evaluate each target and write what it achieved. Raises PrlError where a model does not answer."""
        steps = sum(map(len, self.engines)) - 1
        self.monitors.start(self.run_dir, max_steps=steps, run_config=data_of(self.config))
        with contextlib.closing(self.monitors):
            async with contextlib.AsyncExitStack() as serving:
                for env in self.envs:
                    await serving.enter_async_context(env.environment.serving())
                await serve_each(self.config, self.engines, self.run_dir / "logs" / "engine.log", self._evaluate)

    async def _evaluate(self, target: Target, pool: ModelPool) -> None:
        step = len(self.result.targets)
        print(f"evaluating {target.name} ({step + 1} of {sum(map(len, self.engines))})", file=sys.stderr, flush=True)
        where = target.model.path if target.endpoint is None else target.endpoint.urls[0]
        score = TargetScore(name=target.name, step=step, path=where)
        metrics: dict[str, float] = {}
        for env in self.envs:
            asked = Sampler()
            for sampler in (env.eval_sampler, asked):
                attach(sampler, pool, self.renderers[target.name, env.name], target.model, self.config.seed)
            env.environment.connect(asked, {})
            await env.environment.wait_for_models()
            rollouts, env_metrics = await evaluate_env(env, self.config.k, self.run_dir, step)
            reasons = [r.outcome.reason for r in rollouts if r.outcome is not None and r.outcome.source == "engine"]
            if reasons:  # what the model would have earned is not known
                asked_for = f"{len(reasons)} of {len(rollouts)} rollouts"
                raise PrlError(f"{target.name} did not answer {asked_for}; first: {reasons[0]}")
            tasks = score_tasks(rollouts, self.config.correct_at)
            base = self.base.setdefault(env.name, tasks)
            score.envs.append(score_env(env.name, tasks, base if step else None))
            metrics |= env_metrics | {f"eval/{env.name}/pass@{k}": s.mean for k, s in score.envs[-1].pass_at.items()}
        self.result.targets.append(score)
        self.result.steps, self.result.metrics = step, {**self.result.metrics, **metrics}
        self.monitors.step({"step": step} | metrics)


def attach(sampler: Sampler, pool: ModelPool, renderer: Renderer, model: ModelConfig, seed: int) -> None:
    """Have a sampler ask the model behind `pool`."""
    sampler.attach(
        pool=pool, renderer=renderer, max_model_len=model.max_model_len, seed=seed, tokenizer_path=model.path
    )


def prepare(config: EvaluationConfig) -> Evaluation:
    """Check everything that can be refused before anything is started. Raises ConfigError."""
    engines = prepare_targets(config)
    if not config.envs:
        raise ConfigError("no env: choose one with env=<name>, e.g. env=math")
    monitors = Monitors({name: build(node, Monitor, f"monitor.{name}") for name, node in config.monitor.items()})
    envs = [_eval_env(config, name) for name in config.envs]
    renderers = {}
    for target in [target for group in engines for target in group]:
        tokenizer = load_tokenizer(target.model.path, target.name, target.model.trust_remote_code)
        made: dict[str, Renderer] = {}
        for env in envs:
            own = config.envs[env.name].renderer
            where, node = ("renderer", config.renderer) if own is None else (f"envs.{env.name}.renderer", own)
            made[where] = made.get(where) or renderer_of(where, node, target.model, tokenizer)
            env.environment.check_renderer(made[where])
            rendered_prompts(env.environment, made[where], where)
            renderers[target.name, env.name] = made[where]
    return Evaluation(config, engines, envs, renderers, monitors, Path(config.run.dir))


def prepare_targets(config: EvaluationConfig) -> list[list[Target]]:
    """Check the config but for its envs; return the targets that one engine after the other is to serve."""
    check_device(config.engine.device, "engine.device")
    check_run_name(config.run.name)
    build(config.launcher, Launcher, "launcher")
    build(config.sampling, Sampler, "sampling")
    targets = find_targets(config)
    for target in targets:
        if target.endpoint is None:
            validate_server(target.model, config.engine)
            check_loadable(target.model, "model.", config.engine, trained=False)
    engines = by_engine(targets)
    loaded = [group[0].name for group in engines if group[0].endpoint is None]
    if config.engine.urls and len(loaded) > 1:
        raise ConfigError(f"engine.urls: one engine cannot load both {' and '.join(loaded)}, whose shapes differ")
    if loaded:
        run_token(config)
    return engines


def _eval_env(config: EvaluationConfig, name: str) -> EvalEnv:
    check_env_name(name)
    node = config.envs[name]
    if node.eval_args is None:
        raise ConfigError(f"envs.{name}.eval_args is null: the env has no held-out tasks; say which they are")
    check_env_models(name, node, lambda _: False)
    where, sampling = sampling_of(config, name)
    sampler = build(sampling, Sampler, where)
    environment = Environment(name, node, eval_tasks=config.num_tasks)
    if not environment.eval_tasks:
        raise ConfigError(f"envs.{name}.args: {reason_ungraded(environment.tasks[0])}")
    return EvalEnv(environment=environment, eval_sampler=sampler)
