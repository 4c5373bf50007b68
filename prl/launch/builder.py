"""The parts of a run, built from its config."""

import asyncio
import copy
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from prl.config.instantiate import class_of, locate_call, locate_class, run_check
from prl.config.model_reference import POLICY, FrozenModelConfig
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import resolve_device
from prl.episodes.environment import Environment
from prl.errors import ConfigError, PrlError
from prl.inference.auth import RUN_TOKEN_VARIABLE, TOKEN_VARIABLE
from prl.inference.client import InferencePool, ModelPool
from prl.inference.frozen import FrozenPool
from prl.inference.renderer import make_renderer
from prl.inference.sampler import Sampler, derive_seed
from prl.launch.engine import model_environment, resolve_model, start_engine
from prl.launch.supervisor import Supervisor
from prl.monitors.monitor import Monitor
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.algo.check import check_tasks, hosted_references
from prl.orchestrator.buffer import Buffer, warn_of_strangers
from prl.orchestrator.filters import Filters
from prl.orchestrator.filters.check import check_filters
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.types import TrainEnv
from prl.trainer.config import AIPOLossConfig, DefaultLossConfig
from prl.wire import files

OWN_LOSSES = (DefaultLossConfig, AIPOLossConfig)


@dataclass
class RunBuilder:
    """What a run is made of. `load` makes everything that can be refused; nothing is started before `start`."""

    config: TrainConfig
    environments: list[Environment]
    buffers: dict[str, Buffer]
    """By env: its tasks, in the order in which they will come."""
    renderer: Any
    model: dict[str, Any]
    """The model node with its path and number format resolved for this machine."""
    hosted: list[FrozenModelConfig]
    """References to the frozen model that the launcher is to host; empty = none is hosted."""
    vocab_size: int
    """Tokens in the policy's vocabulary, without padding rows of its embedding."""
    engine_device: str
    trainer_device: str
    token: str
    """What every server of the run wants to be shown."""

    @classmethod
    def load(cls, config: TrainConfig) -> "RunBuilder":
        """Resolve what depends on this machine, and load tokenizer and tasks. Raises ConfigError."""
        config = copy.deepcopy(config)  # a hosted model's URL will be written into it
        engine_device = resolve_device(config.inference.device)
        find_targets(config)
        check_filters(config.filters)
        tokenizer = load_tokenizer(config.model, "model.path")
        if hosted := hosted_references(config):
            check_vocabulary(tokenizer, load_tokenizer(config.teacher.model, "teacher.model.path"), config)
        eval_config = config.orchestrator.eval
        count = eval_config.num_tasks if eval_config.every is not None else 0
        environments = [Environment(name, env, eval_tasks=count) for name, env in config.envs.items()]
        check_tasks(config, {env.name: env.tasks for env in environments})
        renderer = policy_renderer(config, tokenizer)
        for env in environments:
            env.check_renderer(renderer)
        return cls(
            config=config,
            environments=environments,
            buffers=make_buffers(config, environments),
            renderer=renderer,
            model=resolve_model(config.model, engine_device),
            hosted=hosted,
            vocab_size=len(tokenizer),
            engine_device=engine_device,
            trainer_device=resolve_device(config.trainer.device),
            token=run_token(config),
        )

    async def start(self, processes: Supervisor, run_dir: Path) -> InferencePool:
        """Start the engine, the trainer and what else the run hosts side by side; return when all are ready."""
        os.environ[RUN_TOKEN_VARIABLE] = self.token  # where verifiers' client and the hosted teacher's look for it
        logs, config = run_dir / "logs", self.config
        common = {"token": self.token, "seed": config.seed}
        urls, ready = config.inference.urls, [self._trainer_ready(run_dir, processes)]
        if not urls:
            url, _ = start_engine(
                processes, config.inference, self.model, device=self.engine_device, log=logs / "inference.log", **common
            )
            urls = [url]
        if self.hosted:
            ready.append(self._host_teacher(processes, logs / "teacher.log", common))
        self._start_trainer(processes, run_dir)
        pool = InferencePool(urls, "policy", self.token)
        try:
            await asyncio.gather(pool.wait_ready(config.inference.startup_timeout_s, processes.check), *ready)
            if config.inference.urls:  # an engine that ran before may hold another run's weights
                await pool.update_weights(0, self.model["path"], config.inference.update_timeout_s)
        except BaseException:
            await pool.close()
            raise
        return pool

    def _host_teacher(self, processes: Supervisor, log: Path, common: dict[str, Any]) -> Awaitable[None]:
        """Start the server of the teacher, and tell its references where it is. Returns the wait for it."""
        teacher = self.config.teacher
        device = resolve_device(teacher.inference.device)
        url, _ = start_engine(
            processes,
            teacher.inference,
            resolve_model(teacher.model, device),
            device=device,
            log=log,
            frozen=teacher.name,
            **common,
        )
        for reference in self.hosted:
            reference.base_url, reference.api_key_var = f"{url}/v1", RUN_TOKEN_VARIABLE

        async def ready() -> None:
            pool = FrozenPool(self.hosted[0])
            try:
                await pool.wait_ready(teacher.inference.startup_timeout_s, processes.check)
            finally:
                await pool.close()

        return ready()

    def _start_trainer(self, processes: Supervisor, run_dir: Path) -> None:
        config = self.config
        payload = {
            "model": self.model,
            "loss": node_dict(config.loss),
            "seed": config.seed,
            "max_steps": config.max_steps,
            "trainer": asdict(config.trainer) | {"device": self.trainer_device},
            "token_export": config.monitor.token_export,
        }
        ranks = config.trainer.num_processes
        command = [sys.executable, "-m", "prl.trainer", str(run_dir.resolve())]
        if ranks > 1:
            module = command[1:]
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={ranks}",
                *module,
            ]
        env = model_environment(self.model) | {"PRL_CONFIG": json.dumps(payload)}
        processes.start("trainer", command, env=env, log=run_dir / "logs" / "trainer.log").may_finish = True

    async def _trainer_ready(self, run_dir: Path, processes: Supervisor) -> None:
        timeout_s = self.config.trainer.ready_timeout_s
        deadline = time.monotonic() + timeout_s
        while files.read_metrics(run_dir, 0) is None:
            processes.check()
            if time.monotonic() > deadline:
                raise PrlError(f"the trainer had not loaded {self.model['path']} after {timeout_s:g} s")
            await asyncio.sleep(0.05)

    def orchestrator(self, pool: InferencePool, monitor: Monitor, run_dir: Path) -> Orchestrator:
        config = self.config
        return locate_class(config.orchestrator._target_, Orchestrator, "orchestrator")(
            config.orchestrator,
            [self._train_env(environment, pool) for environment in self.environments],
            pool,
            Filters(config.filters, vocab_size=self.vocab_size),
            monitor,
            run_dir=run_dir,
            max_steps=config.max_steps,
            seq_len=config.trainer.seq_len,
            trainer_ranks=config.trainer.num_processes,
            update_timeout_s=config.inference.update_timeout_s,
            oversampling=getattr(config.buffer, "oversampling_factor", 1.0),
        )

    def _train_env(self, environment: Environment, pool: InferencePool) -> TrainEnv:
        """An env with its samplers, algorithm and buffer."""
        config, name = self.config, environment.name
        where, node = config.algo_of(name)
        size = environment.config.group_size

        algorithm = locate_class(node._target_, Algorithm, where)(node, policy_pool=pool, renderer=self.renderer)
        reserve = algorithm.reserve(environment.tasks)

        def sampler(of: ModelPool) -> Sampler:
            return Sampler(
                node.sampling,
                of,
                self.renderer,
                max_model_len=config.model.max_model_len,
                seed=config.seed,
                tokenizer_path=self.model["path"],
                reserve=reserve,
            )

        policy_sampler, source = sampler(pool), node.sampling.source
        return TrainEnv(
            environment,
            buffer=self.buffers[name],
            sampler=policy_sampler if source == POLICY else sampler(FrozenPool(source)),
            policy_sampler=policy_sampler,
            algorithm=algorithm,
            group_size=config.orchestrator.group_size if size is None else size,
        )


def make_buffers(config: TrainConfig, environments: list[Environment]) -> dict[str, Buffer]:
    """A buffer for each env. Raises ConfigError where `buffer.load_from` leaves nothing to train on."""
    cls = locate_class(config.buffer._target_, Buffer, "buffer")
    buffers = {
        env.name: cls(config.buffer, env.tasks, derive_seed(config.seed, f"buffer/{env.name}"), env.name)
        for env in environments
    }
    if config.buffer.load_from is not None:
        warn_of_strangers(config.buffer.load_from, config.envs)
    if all(buffer.ended for buffer in buffers.values()):
        raise ConfigError(
            f"buffer.load_from={config.buffer.load_from!r} retires every task of every env: take a share of them back with "
            "buffer.easy_fraction and buffer.hard_fraction, or all with buffer.refill=true"
        )
    return buffers


def find_targets(config: TrainConfig) -> None:
    """Find everything that a `_target_` names, now rather than when the engine has started."""
    class_of(config.orchestrator, Orchestrator, "orchestrator")
    advice = "let it take its schema, /schema/buffer@_here_: passes"
    run_check(class_of(config.buffer, Buffer, "buffer"), config.buffer, "buffer", advice)
    loss = config.loss
    if not (isinstance(loss, OWN_LOSSES) and loss._target_ == type(loss)._target_):  # these would load torch here
        locate_call(loss, "loss")


def run_token(config: TrainConfig) -> str:
    """A fresh token for this run's servers, or the one that running engines were started with."""
    if not config.inference.urls:
        return secrets.token_hex(24)
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(f"inference.urls names servers that already run: set {TOKEN_VARIABLE} to their token")
    return os.environ[TOKEN_VARIABLE]


def load_tokenizer(model: ModelConfig, key: str) -> Any:
    """The model's tokenizer; `key` names its path in the config, for messages."""
    from transformers import AutoTokenizer

    local = Path(model.path).expanduser().is_dir()
    try:
        return AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=local
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={model.path!r}: no tokenizer there, on this machine or on the hub ({error})"
        ) from error


def check_vocabulary(policy: Any, teacher: Any, config: TrainConfig) -> None:
    """Tokens go to the teacher as ids: raise ConfigError unless both models mean the same by them."""
    if policy.get_vocab() != teacher.get_vocab():
        raise ConfigError(
            f"the teacher ({config.teacher.model.path}) has another tokenizer than the policy ({config.model.path}): choose one "
            "of the policy's family with teacher.model.path, or teacher=endpoint"
        )


def policy_renderer(config: TrainConfig, tokenizer: Any) -> Any:
    """The renderer of the policy's chat template."""
    if config.renderer.name == "auto" and config.model.renderer:
        return make_renderer(tokenizer, config.model.renderer, config.renderer.args, "model.renderer")
    return make_renderer(tokenizer, config.renderer.name, config.renderer.args)


def node_dict(node: Any) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.structured(node), resolve=True)
