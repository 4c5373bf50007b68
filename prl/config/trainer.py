"""Config nodes of the trainer, its transport and the rl losses. No torch here: a config is composed with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import MISSING

from prl.base.errors import ConfigError
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


@dataclass
class RefKLConfig:
    """Settings of the ref_kl loss."""

    mask_low: Annotated[float, Ge(0)] = 0.2
    """Trust region: drop tokens whose probability fell by more than this since sampling."""
    kl_tau: Annotated[float, Ge(0), Le(1e6)] = 1e-3
    """Scale of the regulariser towards the sampler."""


@dataclass
class TrainerConfig:
    """Trains the policy on shipped micro-batches."""

    _target_: str = "prl.trainer.trainer.Trainer"
    _partial_: bool = True
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
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser in host memory, and update them there, to save GPU memory."""
    threads: Annotated[int, Ge(1)] | None = None
    """CPU threads of each rank; null = its share of the cores, at most one for each 2.5 million parameters, and 8 where
    it has a GPU. On a CPU the order of sums follows it: another number gives other last digits."""
    seq_len: Annotated[int, Ge(2)] = 512
    """Row length of packed micro-batches, tokens; longer samples are truncated and counted."""
    tokens_per_forward: Annotated[int, Ge(1)] = 4096
    """Tokens of a micro-batch, the packed sequences of one forward pass. Gradients accumulate over the micro-batches of
    an update."""
    share_prefixes: bool = True
    """Run tokens that several samples begin with once (prompts, turns before a fork), if the model allows it. False =
    run every sample with all of its tokens."""
    head_chunk: Annotated[int, Ge(1)] | None = None
    """Tokens whose logits exist at one time; null = a number that takes little memory, at most 1024."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in backward, for less memory and more time: all of each layer (full), or all but matrix
    products and attention (selective)."""
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
    """Without token_export: number of steps, spread over the run, whose first 32 sequences are written for the run's
    page."""
    ready_timeout_s: Seconds = 600.0
    """Deadline for the ranks to meet, and then for the trainer to load the model, seconds."""
    batch_timeout_s: Seconds = 3600.0
    """Deadline for the next batch to arrive, seconds."""
    finish_timeout_s: Seconds = 1800.0
    """Deadline for the trainer to write its last checkpoint and end, seconds."""


def runs_in_half(dtype: str, device: str) -> bool:
    """Return whether `trainer.dtype` means bfloat16 on a device of this type."""
    return dtype == "bfloat16" or (dtype == "auto" and device == "cuda")


AggMode = Literal["token_mean", "sequence_mean", "rollout_mean", "constant"]


@dataclass
class PolicyLossConfig:
    """Options of all rl losses of prl. `prl.losses.policy.PolicyTokens` has the formulas."""

    has_ratio: ClassVar[bool] = True
    """Whether the loss has a ratio to the sampler of its own."""
    _partial_: bool = True
    entropy_coef: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """Entropy bonus: subtract this times the mean entropy of the policy at rl tokens, in nats, from the loss. 0 =
    off."""
    entropy_target: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Target of the mean entropy at the rl tokens of this loss (`entropy_rl/<env, all>`), nats. After a step below it
    `entropy_coef` grows by `entropy_step`; after a step above it `entropy_coef` shrinks and is not applied. null =
    `entropy_coef` is constant."""
    entropy_step: Annotated[float, Gt(0), Le(1e6)] = 0.005
    """Change of `entropy_coef` after a step, only for `entropy_target`."""
    agg_mode: AggMode = "token_mean"
    """Mean over tokens, over sequences (samples), over rollouts, or the sum divided by `constant_length` times the
    number of sequences, which does not depend on lengths."""
    constant_length: Annotated[int, Ge(1)] | None = None
    """Tokens, only for `agg_mode=constant`, e.g. the longest completion."""
    proximal: bool = False
    """Take ratios to the trainer's logprobs before the first update on a batch, not to the sampler's (decoupled PPO,
    arXiv 2505.24298); for several updates on a batch. `correction` weighs the ratio between the two."""
    correction: Literal["none", "tis", "icepop", "sequence"] = "none"
    """Correction of the mismatch of trainer and sampler, by their ratio rho: truncated importance sampling (tis)
    multiplies advantages by rho, at most `correction_cap`; icepop masks tokens, and sequence masks sequences (by their
    geometric mean), outside `correction_low` and `correction_high`."""
    correction_cap: Annotated[float, Gt(0), Le(1e30)] = 2.0
    """Largest rho, for `tis`."""
    correction_low: Annotated[float, Ge(0), Le(1)] = 0.5
    """Smallest rho that trains, for `icepop` and `sequence`."""
    correction_high: Annotated[float, Ge(1), Le(1e30)] = 5.0
    """Largest rho that trains, for `icepop` and `sequence`."""


CUTS = ("icepop", "sequence")
"""Corrections that leave tokens out."""


def check_policy_loss(where: str, options: Mapping[str, Any], *, several_updates: bool, has_ratio: bool) -> None:
    """Raise ConfigError for options of an rl loss that contradict each other or the number of updates on a batch.

    Args:
        where: the config key of the loss.
        options: its options, also those of a function of the user's own.
        several_updates: whether a batch has more than one.
        has_ratio: whether the loss has a ratio to the sampler of its own.
    """
    if options.get("proximal") and not several_updates:
        raise ConfigError(
            f"{where}.proximal=true: with one update on a batch the ratio to the logprobs before it is always 1; set "
            "trainer.updates_per_batch or trainer.epochs above 1, or leave it out"
        )
    read_by = {"correction_cap": ("tis",), "correction_low": CUTS, "correction_high": CUTS}
    for name, corrections in read_by.items():
        unread = name in options and options.get("correction", "none") not in corrections
        if unread and options[name] != getattr(PolicyLossConfig, name):
            raise ConfigError(f"{where}.{name} is given, but only correction={' or '.join(corrections)} reads it")
    if options.get("correction") == "tis" and has_ratio and not options.get("proximal"):
        raise ConfigError(
            f"{where}.correction=tis: the loss has a ratio to the sampler itself, which would count twice; choose "
            f"loss=reinforce, {where}.proximal=true, or {where}.correction=icepop, which only leaves tokens out"
        )
    mode, length = options.get("agg_mode"), options.get("constant_length")
    if mode == "constant" and length is None:
        raise ConfigError(f"{where}.agg_mode=constant needs {where}.constant_length=<tokens>")
    if mode not in (None, "constant") and length is not None:
        raise ConfigError(
            f"{where}.constant_length={length}: {where}.agg_mode={mode} reads none; set agg_mode=constant"
        )


@dataclass
class DefaultLossConfig(PolicyLossConfig):
    """DPPO-masked policy gradient with a squared-log-ratio regulariser."""

    _target_: str = "prl.losses.default_loss"
    dppo_mask_low: Annotated[float, Ge(0)] = 0.2
    """Drop tokens with A <= 0 whose probability fell by more than this since sampling."""
    dppo_mask_high: Annotated[float, Ge(0)] = 0.2
    """Drop tokens with A > 0 whose probability rose by more than this since sampling."""
    adv_tau: Annotated[float, Ge(-1e6), Le(1e6)] = 1.0
    """Scale of the policy-gradient term, for which gradients must stay finite; 0 = only the regulariser."""
    kl_tau: Annotated[float, Ge(0), Le(1e6)] = 1e-3
    """Scale of the regulariser."""
    delta: Annotated[float, Gt(0), Le(1e30)] | None = 8.0
    """Upper clamp of the importance ratio in the policy-gradient term, without gradient above it. Without it the ratio
    of a rare token with A <= 0 has no bound, because the mask does not drop it. null = none."""


@dataclass
class AIPOLossConfig(PolicyLossConfig):
    """Importance-weighted policy gradient with a one-sided clip (arXiv 2505.24034)."""

    _target_: str = "prl.losses.aipo_loss"
    delta: Annotated[float, Gt(0), Le(1e30)] = 8.0
    """Upper clamp of the importance ratio."""


@dataclass
class GSPOLossConfig(PolicyLossConfig):
    """Policy gradient with one clipped importance ratio for each sequence (arXiv 2507.18071).

    The defaults are the paper's, for long completions; of short ones, more are clipped.
    """

    _target_: str = "prl.losses.gspo_loss"
    clip_ratio_low: Annotated[float, Ge(0), Lt(1)] = 3e-4
    """A sequence with A < 0 has no gradient if its ratio is below 1 minus this."""
    clip_ratio_high: Annotated[float, Ge(0), Le(1e30)] = 4e-4
    """A sequence with A > 0 has no gradient if its ratio is above 1 plus this."""
    agg_mode: AggMode = "sequence_mean"
    """As in the other losses."""


@dataclass
class PPOLossConfig(PolicyLossConfig):
    """PPO's clipped policy gradient (arXiv 1707.06347), with clip-higher and dual clip."""

    _target_: str = "prl.losses.ppo_loss"
    clip_low: Annotated[float, Ge(0), Le(1)] = 0.2
    """PPO clip for A < 0: a token has no gradient if its ratio is below 1 minus this."""
    clip_high: Annotated[float, Ge(0), Le(1e30)] = 0.2
    """PPO clip for A > 0: a token has no gradient if its ratio is above 1 plus this; DAPO has 0.28 (arXiv
    2503.14476)."""
    dual_clip: Annotated[float, Gt(1), Le(1e30)] | None = None
    """A token with A < 0 has no gradient if its ratio is above this, e.g. 3 (arXiv 1912.09729). null = none."""


@dataclass
class CISPOLossConfig(PolicyLossConfig):
    """Policy gradient weighted by a clipped ratio; clipped tokens keep their gradient (arXiv 2506.13585)."""

    _target_: str = "prl.losses.cispo_loss"
    clip_high: Annotated[float, Ge(1), Le(1e30)] = 5.0
    """Largest weight (an upper bound of the ratio itself)."""
    clip_low: Annotated[float, Ge(0), Le(1)] | None = None
    """Smallest weight. null = none."""


@dataclass
class IPOLossConfig(PolicyLossConfig):
    """Policy gradient without tokens whose probability moved far, whatever their advantage."""

    _target_: str = "prl.losses.ipo_loss"
    eps: Annotated[float, Ge(0)] = 0.3
    """Drop tokens whose probability changed by more than this since sampling."""
    kl_tau: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """Scale of the squared-log-ratio regulariser, which also applies to dropped tokens."""
    delta: Annotated[float, Gt(0), Le(1e30)] | None = 8.0
    """Upper clamp of the importance ratio, as in the default loss. null = none."""


@dataclass
class ReinforceLossConfig(PolicyLossConfig):
    """REINFORCE, without a ratio; correction=tis makes it truncated importance sampling."""

    _target_: str = "prl.losses.reinforce_loss"
    has_ratio = False


LOSSES: list[Any] = PolicyLossConfig.__subclasses__()
"""The options of prl's own rl losses."""


@dataclass
class CustomLossConfig:
    """A function of your own, `fn(inputs: LossInputs, **options) -> LossOutputs`, called once per sequence.

    Further keys are its keyword arguments: +loss.clip_eps=0.1.
    """

    _target_: str = MISSING
    """Its Python path."""
    _partial_: bool = True


@dataclass
class FileTransportConfig:
    """Batches and weights as files of the run directory, which all processes of the run must see."""

    _target_: str = "prl.transport.files.FileTransport"
    _partial_: bool = True


@dataclass
class RayTransportConfig:
    """With launcher=ray: batches as calls, weights from node to node, into memory there. No folder in common."""

    _target_: str = "prl.transport.ray.RayTransport"
    _partial_: bool = True
