"""An evaluation from its config: what can be refused, then each target on every env."""

import contextlib
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from renderers.base import Renderer

from prl.base.errors import ConfigError, PrlError
from prl.config.build import build, sampling_of
from prl.config.evaluation import EvaluationConfig
from prl.config.hardware import Machine
from prl.config.run_yaml import data_of
from prl.config.schema import ModelConfig
from prl.config.validate import check_env_models, check_env_name, check_run_name, validate_server
from prl.engines.client import ModelPool
from prl.engines.frozen import clients_of
from prl.engines.sampler import Sampler
from prl.engines.tokenizers import load_tokenizer
from prl.envs.environment import Environment, reason_ungraded
from prl.launch.checks import check_loadable
from prl.launch.components import picture_store, renderer_of
from prl.launch.launcher import Launcher
from prl.launch.plan import NO_NEED, POLICY_NAME, model_plan, need_of, placed, token_of
from prl.launch.prompts import checked_prompts
from prl.launch.shared_engines import launcher_of
from prl.monitors.base import Monitor, Monitors
from prl.orchestrator.evaluate import evaluate_env
from prl.orchestrator.types import EvalEnv
from prl.orchestrator.who_waits import ENGINE
from prl.rollouts.pictures import FOLDER, PictureStore
from prl.runs.result import RunResult
from prl.tools.evaluation.scores import EnvScore, TaskScore, score_env, score_tasks
from prl.tools.evaluation.serving import Served, serve_each
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
    engines: list[Served]
    """The engines, one after the other, with the targets of each."""
    envs: list[EvalEnv]
    renderers: dict[tuple[str, str], Renderer]
    """Renderers by target and env."""
    monitors: Monitors
    run_dir: Path
    result: EvaluationResult = field(default_factory=EvaluationResult)
    base: dict[str, list[TaskScore]] = field(default_factory=dict)
    """Scores of the first target, by env."""

    @property
    def targets(self) -> list[Target]:
        """The models that are evaluated."""
        return [target for served in self.engines for target in served.targets]

    async def run(self) -> None:
        """Evaluate each target and write what it achieved. Raises PrlError where a model does not answer."""
        self.monitors.start(self.run_dir, max_steps=len(self.targets) - 1, run_config=data_of(self.config))
        with contextlib.closing(self.monitors):
            async with contextlib.AsyncExitStack() as serving:
                for env in self.envs:
                    await serving.enter_async_context(env.environment.serving())
                await serve_each(partial(launcher_of, self.config.launcher), self.engines, self._evaluate)

    async def _evaluate(self, target: Target, pool: ModelPool) -> None:
        step = len(self.result.targets)
        print(f"evaluating {target.name} ({step + 1} of {len(self.targets)})", file=sys.stderr, flush=True)
        where = target.model.path if target.endpoint is None else target.endpoint.urls[0]
        score = TargetScore(name=target.name, step=step, path=where)
        metrics: dict[str, float] = {}
        for env in self.envs:
            asked = Sampler()
            for sampler in (env.eval_sampler, asked):
                attach(sampler, pool, self.renderers[target.name, env.name], target.model, self.config.seed)
            env.environment.connect(asked, clients_of({}, asked.pictures))
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


def evaluation_of(config: EvaluationConfig) -> Evaluation:
    """Check everything that can be refused before anything is started. Raises ConfigError."""
    run_dir = Path(config.run.dir)
    engines = plan_engines(config, run_dir / "logs" / "engine.log", run_dir / FOLDER)
    if not config.envs:
        raise ConfigError("no env: choose one with env=<name>, e.g. env=math")
    monitors = Monitors({name: build(node, Monitor, f"monitor.{name}") for name, node in config.monitor.items()})
    pictures = next((served.pictures for served in engines if served.pictures is not None), None)
    envs = [_eval_env(config, name, pictures) for name in config.envs]
    evaluation = Evaluation(config, engines, envs, {}, monitors, run_dir)
    for target, shown in [(target, served.pictures) for served in engines for target in served.targets]:
        tokenizer = load_tokenizer(target.model.path, target.name, target.model.trust_remote_code)
        made: dict[str, Renderer] = {}
        for env in envs:
            own = config.envs[env.name].renderer
            where, node = ("renderer", config.renderer) if own is None else (f"envs.{env.name}.renderer", own)
            # Envs that share a renderer share the object.
            if where not in made:
                made[where] = renderer_of(where, node, target.model, tokenizer, shown)
            checked_prompts(env.environment, made[where], where, target.model.max_model_len)
            evaluation.renderers[target.name, env.name] = made[where]
    return evaluation


def plan_engines(config: EvaluationConfig, log: Path, folder: Path | None = None) -> list[Served]:
    """Check the config but for its envs; return the engines that serve its targets one after the other.

    Args:
        config: The config of an evaluation, or of a chat.
        log: The file for the output of the first server.
        folder: The folder of the pictures that targets are shown; None = they are kept for as long as they are used.
    """
    machine = Machine()
    machine.check_device(config.engine.device, "engine.device")
    check_run_name(config.run.name)
    launcher = launcher_of(config.launcher)
    build(config.sampling, Sampler, "sampling")
    targets = find_targets(config.targets, config.model, config.endpoint)
    needs = [need_of(config.engine, "engine", machine), NO_NEED, NO_NEED]
    of_model = partial(
        model_plan,
        config.engine,
        gpus=placed(needs, machine, elsewhere=launcher.places_processes).engines,
        machine=machine,
        process=ENGINE,
        served_name=POLICY_NAME,
        # Endpoints have keys of their own.
        token=token_of(config.engine.urls) if any(target.endpoint is None for target in targets) else "",
        log=log,
        seed=config.seed,
        sharing=config.engine.servers,
    )
    plans = {target.name: of_model(target.model) for target in targets if target.endpoint is None}
    for target in targets:
        if target.endpoint is None:
            validate_server(target.model, config.engine, machine)
            check_loadable(target.model, plans[target.name], "model.", trained=False)
    if launcher.submits or (
        type(launcher).start_engine is Launcher.start_engine and any(each.is_started for each in plans.values())
    ):
        raise ConfigError(f"launcher: {type(launcher).__name__} starts no server here: choose launcher=local or ray")
    groups = by_engine(targets)
    stores = [picture_store(group[0].model, folder) for group in groups]
    shared = next(filter(None, stores), None)  # all that see are shown the same pictures
    engines = [
        Served(group, plans.get(group[0].name), store and shared) for group, store in zip(groups, stores, strict=True)
    ]
    loaded = [served.targets[0].name for served in engines if served.plan is not None]
    if config.engine.urls and len(loaded) > 1:
        raise ConfigError(f"engine.urls: one engine cannot load both {' and '.join(loaded)}, whose shapes differ")
    return engines


def _eval_env(config: EvaluationConfig, name: str, pictures: PictureStore | None) -> EvalEnv:
    check_env_name(name)
    node = config.envs[name]
    if node.eval_args is None:
        raise ConfigError(f"envs.{name}.eval_args is null: the env has no held-out tasks; say which they are")
    check_env_models(name, node, lambda _: False)
    where, sampling = sampling_of(config, name)
    sampler = build(sampling, Sampler, where)
    environment = Environment(name, node, eval_tasks=config.num_tasks, pictures=pictures)
    if not environment.eval_tasks:
        raise ConfigError(f"envs.{name}.args: {reason_ungraded(environment.tasks[0])}")
    return EvalEnv(environment=environment, eval_sampler=sampler)
