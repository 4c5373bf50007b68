"""The parts of a run, built from its config."""

import asyncio
import json
import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from prl.config.build import locate_class, locate_function
from prl.config.check import resolve_device
from prl.config.errors import ConfigError, PrlError
from prl.config.schema import TrainConfig
from prl.inference.auth import TOKEN_VARIABLE
from prl.inference.client import InferencePool
from prl.launch.engine import model_environment, start_engine
from prl.launch.processes import Supervisor
from prl.monitors.monitor import Monitor
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.buffer import Buffer
from prl.orchestrator.dispatcher import TrainEnv
from prl.orchestrator.filters import FilterSlot
from prl.orchestrator.filters.base import Filter
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.sampler import Sampler, derive_seed
from prl.rollouts.environment import Environment
from prl.rollouts.renderer import make_renderer
from prl.wire import files


@dataclass
class Parts:
    """What a run is made of. `load` makes everything that can be refused; nothing is started before `start`."""

    config: TrainConfig
    environments: list[Environment]
    renderer: Any
    model: dict[str, Any]
    """The model node with its path and number format resolved for this machine."""
    engine_device: str
    trainer_device: str
    token: str

    @classmethod
    def load(cls, config: TrainConfig) -> "Parts":
        """Resolve what depends on this machine, and load tokenizer and tasks. Raises ConfigError."""
        engine_device = resolve_device(config.inference.device)
        model = asdict(config.model)
        if Path(model["path"]).expanduser().is_dir():
            model["path"] = str(Path(model["path"]).expanduser().resolve())
        if model["dtype"] == "auto":
            model["dtype"] = "float32" if engine_device == "cpu" else "bfloat16"
        find_targets(config)
        eval_config = config.orchestrator.eval
        count = eval_config.num_tasks if eval_config.every is not None else 0
        return cls(
            config=config,
            environments=[Environment(name, env, eval_tasks=count) for name, env in config.envs.items()],
            renderer=policy_renderer(config),
            model=model,
            engine_device=engine_device,
            trainer_device=resolve_device(config.trainer.device),
            token=run_token(config),
        )

    async def start(self, processes: Supervisor, run_dir: Path) -> InferencePool:
        """Start the engine and the trainer side by side; return when both are ready."""
        urls = self.config.inference.urls
        if not urls:
            url, _ = start_engine(
                processes, self.config.inference, self.model, device=self.engine_device, token=self.token,
                seed=self.config.seed, log=run_dir / "logs" / "inference.log",
            )  # fmt: skip
            urls = [url]
        self._start_trainer(processes, run_dir)
        os.environ[TOKEN_VARIABLE] = self.token  # where verifiers' own client looks for it
        pool = InferencePool(urls, "policy", self.token)
        try:
            await asyncio.gather(
                pool.wait_ready(self.config.inference.startup_timeout_s, processes.check),
                self._trainer_ready(run_dir, processes),
            )
            if self.config.inference.urls:  # an engine that ran before may hold another run's weights
                await pool.update_weights(0, self.model["path"], self.config.inference.update_timeout_s)
        except BaseException:
            await pool.close()
            raise
        return pool

    def _start_trainer(self, processes: Supervisor, run_dir: Path) -> None:
        config = self.config
        payload = {
            "model": self.model, "loss": node_dict(config.loss), "seed": config.seed, "max_steps": config.max_steps,
            "trainer": asdict(config.trainer) | {"device": self.trainer_device},
        }  # fmt: skip
        ranks = config.trainer.num_processes
        command = [sys.executable, "-m", "prl.trainer", str(run_dir.resolve())]
        if ranks > 1:
            module = command[1:]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *module]
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
            FilterSlot(config.filters.post_batch, "filters.post_batch"),
            monitor,
            run_dir=run_dir,
            max_steps=config.max_steps,
            seq_len=config.trainer.seq_len,
            trainer_ranks=config.trainer.num_processes,
            update_timeout_s=config.inference.update_timeout_s,
        )

    def _train_env(self, environment: Environment, pool: InferencePool) -> TrainEnv:
        """An env with its sampler, algorithm and buffer. An env's own algorithm replaces the run's."""
        config, name = self.config, environment.name
        own = environment.config.algo
        node, where = (config.algo, "algo") if own is None else (own, f"envs.{name}.algo")
        size = environment.config.group_size
        seed = derive_seed(config.seed, f"buffer/{name}")
        return TrainEnv(
            environment,
            buffer=locate_class(config.buffer._target_, Buffer, "buffer")(config.buffer, environment.tasks, seed),
            sampler=Sampler(
                node.sampling, pool, self.renderer, max_model_len=config.model.max_model_len, seed=config.seed,
                tokenizer_path=self.model["path"],
            ),  # fmt: skip
            algorithm=locate_class(node._target_, Algorithm, where)(node, policy_pool=pool),
            group_size=config.orchestrator.group_size if size is None else size,
        )


def find_targets(config: TrainConfig) -> None:
    """Find everything that a `_target_` names, now rather than when the engine has started."""
    nodes = [("orchestrator", config.orchestrator, Orchestrator), ("buffer", config.buffer, Buffer)]
    nodes += [("algo", config.algo, Algorithm)]
    nodes += [(f"envs.{name}.algo", env.algo, Algorithm) for name, env in config.envs.items() if env.algo is not None]
    nodes += [(f"filters.post_batch.{name}", node, Filter) for name, node in config.filters.post_batch.items()]
    for where, node, base in nodes:
        locate_class(node._target_, base, where)
    if not config.loss._target_.startswith("prl."):  # prl's own exist, and importing them here would load torch
        locate_function(config.loss._target_, "loss")


def run_token(config: TrainConfig) -> str:
    """A fresh token for this run's engine, or the one that running engines were started with."""
    if not config.inference.urls:
        return secrets.token_hex(24)
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(f"inference.urls names servers that already run: set {TOKEN_VARIABLE} to their token")
    return os.environ[TOKEN_VARIABLE]


def policy_renderer(config: TrainConfig) -> Any:
    """The renderer of the policy's chat template."""
    from transformers import AutoTokenizer

    path = config.model.path
    local = Path(path).expanduser().is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code, local_files_only=local
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path!r}: no tokenizer there, on this machine or on the hub ({error})") from error
    name = config.renderer.name
    if name == "auto" and config.model.renderer:
        name = config.model.renderer
    return make_renderer(tokenizer, name, config.renderer.args)


def node_dict(node: Any) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.structured(node), resolve=True)
