"""Config nodes of the trainer and its transport. No torch here: a config is composed with them."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import MISSING

from prl.config.build import Seconds

MEETING_VARIABLE = "PRL_RANKS"
"""Environment variable of ranks on one machine: a file by which they find each other; unset: as torch's own say."""
OWN_PAGES = 2 << 20
"""Blocks of so many bytes get pages of their own in a trainer, which go back to the system when they are freed."""
KEPT = 32 << 20
"""Freed bytes that the heap of smaller blocks keeps at its end, for the next step."""

Beta = Annotated[float, Ge(0), Lt(1)]


@dataclass
class PartConfig:
    """The parameters of an entry of `parts`: those that match both."""

    match: str | None = None
    """A regular expression for a parameter's name; null = any."""
    dims: int | None = None
    """Its number of dimensions; null = any."""


@dataclass
class OptimConfig:
    """Options of every optimiser. Further keys are settings of its class, e.g. +trainer.optim.amsgrad=true."""

    _target_: str = MISSING
    _partial_: bool = True
    lr: Annotated[float, Gt(0), Le(1e6)] = 5e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """Weight decay of matrices; norms and biases are exempt."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other optimisers for some parameters, by a name of yours: `_target_` with its settings; `match`, a regular
    expression for the parameter's name; `dims`, its number of dimensions. The first match counts."""


@dataclass
class AdamWConfig(OptimConfig):
    """AdamW."""

    _target_: str = "torch.optim.AdamW"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Gt(0), Le(1e6)] = 1e-8
    """Added to the denominator of the update."""
    fused: bool = True
    """Update all parameters in one kernel."""


@dataclass
class SGDConfig(OptimConfig):
    """Stochastic gradient descent."""

    _target_: str = "torch.optim.SGD"
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Momentum."""
    nesterov: bool = False
    """Use Nesterov's momentum."""


@dataclass(frozen=True)
class RefKLConfig:
    """Options of `prl.losses.ref_kl.ref_kl_loss`, here since they are the trainer's and in no group of their own."""

    mask_low: Annotated[float, Ge(0)] = 0.2
    """Trust region: drop tokens whose probability fell by more than this since sampling."""
    kl_tau: Annotated[float, Ge(0), Le(1e6)] = 1e-3
    """Scale of the regulariser towards the sampler."""


@dataclass(frozen=True)
class Precision:
    """Number format of a forward and backward. Another one is another value in `PRECISIONS`, and its place in
    `prl.trainer.sharding.shard`, which tells FSDP."""

    dtype: str
    """Its name, torch's too."""
    size: int
    """Bytes of a number."""
    tolerance: float
    """Difference at which two logprobs of one token are a fault of the model (`prl.trainer.model.check_layout`)."""

    @property
    def is_mixed(self) -> bool:
        """Return whether the model runs in another format than that of its weights, float32."""
        return self.dtype != "float32"


FLOAT32 = Precision("float32", 4, 1e-2)
# Sound models differ by up to 0.2 on random tokens, mixtures of experts by 0.6 where rounding chooses other experts. A
# model that ignores positions differs by 0.4 to 3.3: so `check_layout` draws again before it refuses.
BFLOAT16 = Precision("bfloat16", 2, 0.5)
PRECISIONS = {precision.dtype: precision for precision in (FLOAT32, BFLOAT16)}


def precision_of(dtype: str, device: str) -> Precision:
    """The number format that `trainer.dtype` means on a device of this type, `cpu` or `cuda`."""
    auto = BFLOAT16 if device == "cuda" else FLOAT32
    return auto if dtype == "auto" else PRECISIONS[dtype]


@dataclass
class RanksConfig:
    """Settings of the ranks that train a model: a run's trainer, and the server of the Tinker protocol."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda if there is a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the forward and backward; auto = float32 on a CPU, bfloat16 on a GPU. Weights, sums of
    gradients, the optimiser and logits are always float32."""
    num_processes: Annotated[int, Ge(1)] = 1
    """Trainer ranks: on this machine, or where `launcher=ray` places them (torch: gloo, or nccl on a GPU)."""
    shard_size: Annotated[int, Ge(1)] | None = None
    """Ranks that share one copy of weights, gradients and optimiser (FSDP2); null = all, 1 = each rank has a copy. A
    smaller value takes more memory and less traffic. It divides num_processes."""
    threads: Annotated[int, Ge(1)] | None = None
    """CPU threads of each rank; null = its share of the cores, at most one for each 2.5 million parameters, and 8 where
    it has a GPU. On a CPU the order of sums follows it: another number gives other last digits."""
    tokens_per_forward: Annotated[int, Ge(1)] = 4096
    """Tokens of a micro-batch, the packed sequences of one forward pass. Gradients accumulate over the micro-batches of
    an update."""
    share_prefixes: bool = True
    """Run tokens that several samples begin with once (prompts, turns before a fork), if the model allows it. False =
    run every sample with all of its tokens."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in backward, for less memory and more time: all of each layer (full), or all but matrix
    products and attention (selective)."""


@dataclass
class TrainerConfig(RanksConfig):
    """Trains the policy on shipped micro-batches."""

    _target_: str = "prl.trainer.trainer.Trainer"
    _partial_: bool = True
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in host memory, and update them there, to save GPU memory."""
    seq_len: Annotated[int, Ge(2)] = 512
    """Row length of packed micro-batches, tokens; longer samples are truncated and counted."""
    head_chunk: Annotated[int, Ge(1)] | None = None
    """Tokens whose logits exist at one time; null = a number that takes little memory, at most 1024."""
    compile: bool = False
    """Compile each layer, with torch.compile: a minute at the start, faster steps on a GPU."""
    optim: Any = None
    """The optimiser, of the group `optim`; null = AdamW."""
    updates_per_batch: Annotated[int, Ge(1)] = 1
    """Mini-batches of whole groups in a batch, with an optimiser step each; fewer if the batch has fewer groups. Steps,
    policy versions and the learning rate count batches."""
    epochs: Annotated[int, Ge(1)] = 1
    """Epochs over each batch."""
    ref_kl: RefKLConfig = field(default_factory=RefKLConfig)
    """Settings of the ref_kl loss, of opd, opsd and algo.kl."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Gradients are clipped to this norm."""
    schedule: Any = None
    """Learning rate over steps, of the group `schedule`; null = Linear."""
    token_export: bool = False
    """Write every sequence of every step to `tokens/`, with each token's use in the loss. Large."""
    example_steps: Annotated[int, Ge(0)] = 8
    """Without token_export: number of steps, spread over the run, of which the page shows the first 32 sequences."""
    ready_timeout_s: Seconds = 600.0
    """Deadline for the ranks to meet, and then for the trainer to load the model, seconds."""
    batch_timeout_s: Seconds = 3600.0
    """Deadline for the next batch to arrive, seconds."""
    finish_timeout_s: Seconds = 1800.0
    """Deadline for the trainer to write its last checkpoint and end, seconds."""
