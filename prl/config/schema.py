"""The typed root of a run's config, and the nodes that belong to no single component.

A node typed `Any` is a component: `_target_` names its class, whose signature is its schema (`prl.config.build`).
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import MISSING

from prl.config.build import Seconds
from prl.config.hardware import MachineConfig
from prl.config.model_reference import FrozenModelConfig, as_reference, frozen_models
from prl.config.trainer import RanksConfig

AUTO = "auto"
"""Value of `run.resume`: the last checkpoint of the run directory, else from the start."""


@dataclass
class RunConfig:
    """The name and the directory of a run."""

    name: str = MISSING
    """Directory name under `outputs/`."""
    dir: str = MISSING
    """Run directory, relative to where the command was typed."""


@dataclass
class TrainRunConfig(RunConfig):
    """The directory of a training run, and the run that it goes on from."""

    resume: str | None = None
    """A run directory or a checkpoint to resume, in that directory; `auto` = resume from the last checkpoint in
    `run.dir`, or start there. null = a new run. A directory of somebody else runs its author's code."""
    fork: str | None = None
    """A run directory or a checkpoint from which a new run starts: weights, optimiser, position among the tasks. The
    old run does not change. null = start from step 0. A directory of somebody else runs its author's code."""


@dataclass
class ModelConfig:
    """The policy: its weights, its number format in the engine, and how its chat template is rendered."""

    path: str = MISSING
    """A local folder, or a model's name on the Hugging Face hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the engine's weights: float32, bfloat16, float16; `auto` = float32 on a CPU, bfloat16 on a GPU.
    The trainer always keeps float32 master weights."""
    max_model_len: Annotated[int, Ge(2)] = 4096
    """Longest sequence, prompt and completion together, tokens. `trainer.seq_len` follows it."""
    lr: Annotated[float, Gt(0), Le(1e6)] = 1e-6
    """Peak learning rate that suits the model; `trainer.optim.lr` follows it."""
    renderer: str | None = None
    """Renderer that `renderer=auto` picks for this model; null = by the tokenizer's name."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    max_pixels: Annotated[int, Ge(1), Le(2**27)] = 2**24
    """[pixels] Largest picture that is read; one above is refused. The model's processor then scales it as it does.
    Pillow reads up to 2**27."""


@dataclass
class LoraConfig:
    """Train low-rank adapters (LoRA, arXiv 2106.09685) in place of the weights: W + alpha / rank * B A."""

    rank: Annotated[int, Ge(1), Le(1024)] | None = None
    """Rank of the adapters; null = train all weights.
    LoRA takes three to seven times the learning rate of full training."""
    alpha: Annotated[float, Gt(0), Le(1e6)] = 32.0
    """Adapters are scaled by this divided by the rank."""
    target_modules: list[str] | None = None
    """Linear layers that get an adapter, by the ends of their names: [q_proj,v_proj]; null = all
    but the output head and a vision tower."""


@dataclass
class PolicyModelConfig(ModelConfig):
    """A model that is trained."""

    freeze: list[str] = field(default_factory=list)
    """Parts of the model that are not trained, as its parameters' names have them: [visual] of Qwen3-VL."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class EngineConfig:
    """The options of every engine."""

    _target_: str = MISSING
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where `nvidia-smi` finds a GPU, else the CPU."""
    max_num_seqs: Annotated[int, Ge(1), Le(65536)] = 256
    """Sequences an engine runs at once."""
    threads: Annotated[int, Ge(1)] | None = None
    """CPU threads of one engine; null = its share of the cores, at most one for each 2.5 million parameters, and 8
    where it has a GPU."""
    update_timeout_s: Seconds = 300.0
    """Deadline for one weight update of the policy, seconds. A frozen model is not updated."""

    def gpus_on(self, device: str) -> int:
        """GPUs of one server on a device, `cpu` or `cuda`."""
        return int(device == "cuda")


@dataclass
class TeacherConfig(FrozenModelConfig):
    """The frozen model that `algo=opd` scores with and `algo=sft` samples from, unless they name one of their own."""

    model: ModelConfig | None = None
    """A model for the launcher to host during the run; null = the model at `base_url`."""
    engine: Any = None
    """The hosting server's settings."""


@dataclass
class ServeConfig:
    """A model served on its own: `python -m prl.serve`."""

    name: str = MISSING
    """Name that a frozen model is served under."""
    policy: bool = False
    """Serve an engine for runs to train with, one after another (their `engine.urls`), instead of a frozen model."""
    tools: bool = False
    """Replies to requests with `tools` have tool calls, read by the parser of the model's family (`model.renderer`)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: Any = MISSING
    log: str = MISSING
    """File that the server's output goes to."""


@dataclass
class TinkerConfig:
    """A server of the Tinker protocol over one model: `python -m prl.serve api=tinker`."""

    name: str = MISSING
    """Name of the model, which clients give as their base_model."""
    dir: str = MISSING
    """Directory of the server: sessions, models, checkpoints. A server that is started again goes on from there."""
    host: str = "127.0.0.1"
    """Address. Any but loopback opens it to the network; requests still need the key."""
    port: Annotated[int, Ge(0), Le(65535)] = 8010
    """TCP port; 0 = a free one."""
    models: Annotated[int, Ge(1), Le(1000)] = 8
    """Models of clients in memory, others are on disk; and snapshots that an engine's server samples from at once."""
    max_models: Annotated[int, Ge(1), Le(1_000_000)] = 1000
    """Models of clients in memory and on disk; above, a new one is refused."""
    max_rank: Annotated[int, Ge(1), Le(1024)] = 128
    """Largest rank of an adapter; an engine's server computes each adapter as if it had this rank."""
    max_queued_tokens: Annotated[int, Ge(1)] = 10_000_000
    """Tokens that wait for training, of all clients; above, a client is told to try again."""
    max_samples: Annotated[int, Ge(1), Le(1_000_000)] = 4096
    """Replies that are sampled or wait; above, a client is told to try again."""
    trainer: RanksConfig = field(default_factory=RanksConfig)
    """Where and how models are trained."""
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: Any = MISSING


@dataclass
class FiltersConfig:
    """Two slots of filters by name, each asked in order: the first that matches a rollout is the one recorded.

    Only the first match counts: a monitoring filter placed before an enforcing one hides shared matches from it.
    """

    pre_batch: dict[str, Any] = field(default_factory=dict)
    """Filters of a group when its advantages are computed: dropped rollouts take no place in a batch."""
    post_batch: dict[str, Any] = field(default_factory=dict)
    """Filters of a batch: dropped rollouts make it smaller."""


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling settings: the options of `prl.engines.sampler.Sampler`."""

    temperature: Annotated[float, Ge(0), Le(2)] = 1.0
    """Engine and trainer divide the logits of sampled tokens by this; the trainer uses 1 for all other tokens. At least
    0.01 where the policy trains on its own samples; 0 = greedy. The servers take none above 2."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens whose probabilities add up to this. 1 = off.
    Not for training."""
    top_k: Annotated[int, Ge(0)] = 0
    """Top-k sampling: sample from this many of the most likely tokens. 0 = off. Not for training."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Sample from tokens of at least this share of the most likely one's probability. 0 = off. Not for training."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """Longest completion of one turn, tokens; null = the rest of `model.max_model_len`."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion. Their tokens stay in it, as sampled: graders and the next turn see the string."""
    seed: Annotated[int, Ge(0)] | None = None
    """Seed of every request, together with the request's name; null = the run's seed."""


def as_run() -> dict[str, Any]:
    """Sampling settings that override none."""
    return dict.fromkeys(each.name for each in fields(SamplingConfig))


@dataclass
class WorkersConfig:
    """Processes of an env's own that run its graders."""

    count: Annotated[int, Ge(1), Le(10_000)] = 8
    """Number of processes. May be above the number of cores: a grader that waits or spins blocks one."""
    where: Literal["local", "ray"] = "local"
    """local: on the machine of the run. ray: on the cluster of `launcher=ray`, a core for each; then all graders run
    there, with any `IN_PROCESS`."""
    memory_gb: Annotated[float, Gt(0), Le(1e6)] = 8.0
    """Memory that each may take for data beside what it has at its start, GiB."""


@dataclass
class EnvConfig:
    """One environment: a verifiers taskset and its place in the run.

    `algo`, `loss`, `filters`, `renderer` and `curriculum` replace the run's node whole where they are set, as in
    `+algo@envs.math.algo=opd`; `sampling` inherits field by field, as in `envs.math.sampling.temperature=0.7`.
    """

    taskset: str
    """An importable module, or the id of an installed verifiers taskset, that exports one `Taskset` in `__all__`."""
    args: dict[str, Any] = field(default_factory=dict)
    """The taskset's config, for training tasks."""
    eval_args: dict[str, Any] | None = None
    """Changes of `args` for held-out evaluation tasks; null = this env is not evaluated."""
    weight: Annotated[float, Ge(0), Le(1e6)] = 1.0
    """Share of rollouts relative to the other envs; 0 = evaluated, never trained on."""
    group_size: Annotated[int | None, Ge(1)] = None
    """Rollouts of one task; null = `orchestrator.group_size`."""
    timeout_s: Seconds = 600.0
    """Deadline of one rollout, seconds."""
    group_timeout_s: Seconds | None = None
    """Deadline of a whole group with its scoring, seconds: rollouts that are not finished then have failed, and the
    rest of the group trains. `score_group` has the same time again. null = none."""
    in_process: bool | None = None
    """true: run its graders in the process of the run, where a slow grader blocks the run; false: in processes of their
    own. null = the taskset's `IN_PROCESS`, else in processes of their own."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """The processes of its graders."""
    models: dict[str, Any] = field(default_factory=dict)
    """Models for its code, by role: `policy`, or a frozen model {name, base_url}, which may be the hosted `teacher`.
    Its graders then run in the process of the run, where the clients are."""
    algo: Any = None
    """The algorithm of this env; null = the run's."""
    sampling: dict[str, Any] = field(default_factory=as_run)
    """Sampling settings of this env; null = the run's."""
    loss: Any = None
    """The loss of this env's `rl` tokens; null = the run's."""
    filters: FiltersConfig | None = None
    """The filters of this env; null = the run's."""
    renderer: Any = None
    """The renderer of this env's messages; null = the run's."""
    curriculum: Any = None
    """The curriculum of this env; null = the run's."""

    @property
    def references(self) -> dict[str, Any]:
        """The references of `models`, by role."""
        return {role: as_reference(value) for role, value in self.models.items()}


@dataclass
class CheckpointConfig:
    """When a run writes what it can go on from, and what of it is kept. The last step always has a checkpoint."""

    every: Annotated[int, Ge(1)] | None = None
    """Steps between checkpoints; null = none by steps."""
    every_minutes: Annotated[float, Ge(0.01), Le(1e7)] | None = 15.0
    """Minutes between checkpoints; null = none by the clock."""
    keep_last: Annotated[int, Ge(1)] | None = 2
    """Number of newest checkpoints to keep; null = all."""
    keep_every: Annotated[int, Ge(1)] | None = None
    """Keep checkpoints of steps that are multiples of this; null = none."""
    grace_s: Annotated[float, Ge(0), Le(1e9)] = 60.0
    """Time for a last checkpoint after a run is stopped (SIGTERM, SIGHUP, Ctrl-C), seconds. 0 = none."""


@dataclass
class OptimizedMetricConfig:
    """The number of a run that a sweep compares its jobs by, and a sweeper optimises."""

    key: str | None = None
    """Name of the metric; `*` stands for anything, and all matches are averaged. null = the held-out reward,
    `eval/*/avg@*`, or in a run without evaluation `reward/all/mean`, if the policy samples."""
    last: Annotated[int, Ge(1)] = 2
    """Number of last steps with the metric to average."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Direction in which the objective improves."""


@dataclass
class SweepConfig:
    """Settings that the jobs of a sweep have in common."""

    share_engine: bool | None = None
    """Keep engines for the next job of the same process, if its model and engine settings are the same; null = where
    jobs of a sweep follow one another in a process, with `launcher=local` and `weights=files`."""

    def shares(self, possible: bool) -> bool:
        """Return whether a run keeps its engines, where it is `possible` or not for others to use them again."""
        return possible if self.share_engine is None else self.share_engine


@dataclass
class TrainConfig:
    """A training run. Nodes that are `Any` name a class or a function each, with its options."""

    run: TrainRunConfig = field(default_factory=TrainRunConfig)
    """Directory and name of the run: `run.name`, `run.dir`."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0  # the largest that a server takes
    """Seed of tasks, sampling and initialisation."""
    max_steps: Annotated[int, Ge(1)] = 60
    """Training steps."""
    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    renderer: Any = MISSING
    envs: dict[str, EnvConfig] = field(default_factory=dict)
    """Environments by name: `envs.math.args`. The group `env` chooses them."""
    algo: Any = MISSING
    sampling: Any = MISSING
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: Any = MISSING
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    curriculum: Any = MISSING
    orchestrator: Any = MISSING
    trainer: Any = MISSING
    engine: Any = MISSING
    weights: Any = MISSING
    launcher: Any = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: dict[str, Any] = field(default_factory=dict)
    """Monitors by name; each gets every step's metrics."""
    optimized_metric: OptimizedMetricConfig = field(default_factory=OptimizedMetricConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    dry_run: bool = False
    """Start nothing: print the processes and memory of the run, and refuse it if that does not fit."""
    machine: MachineConfig = field(default_factory=MachineConfig)

    def node_of(self, env: str, name: str) -> tuple[str, Any]:
        """Return the node `name` (algo, loss, filters, renderer, curriculum) of an env, its own or the run's,
        and its key."""
        own = getattr(self.envs[env], name)
        return (name, getattr(self, name)) if own is None else (f"envs.{env}.{name}", own)

    def group_size_of(self, env: str) -> tuple[str, int]:
        """Rollouts of one task of an env, with the config key that says so."""
        own, default = self.envs[env].group_size, self.orchestrator.group_size
        return ("orchestrator.group_size", default) if own is None else (f"envs.{env}.group_size", own)

    def frozen_of(self, env: str) -> list[tuple[str, FrozenModelConfig]]:
        """The frozen models that an env's algorithm and its code refer to, with their config keys."""
        where, node = self.node_of(env, "algo")
        return [*frozen_models(node, where), *frozen_models(self.envs[env].references, f"envs.{env}.models")]

    def hosts(self, reference: FrozenModelConfig) -> bool:
        """Return whether the launcher serves this frozen model for the run."""
        return self.teacher.model is not None and reference.base_url is None and reference.name == self.teacher.name

    @property
    def hosts_teacher(self) -> bool:
        """Return whether the launcher serves the model of `teacher` for the run: an algorithm or an env asks it."""
        return any(self.hosts(reference) for env in self.envs for _, reference in self.frozen_of(env))
