"""Parts that all rl losses share: the tokens that they are computed on, corrections, the entropy bonus and the
average."""

from torch import Tensor

from prl.losses.interface import LossInputs, TokenTerms, select, weighted

TokenMetrics = dict[str, tuple[Tensor, Tensor]]


class PolicyTokens:
    """The tokens of an rl loss, and what is made of its value for each of them.

    Attributes, `[tokens]`, 0 off the members:
        members: bool, those that `correction` keeps.
        logprobs: t, the trainer's.
        old: i, the sampler's; with `proximal` p, the trainer's before the first update on the batch (decoupled PPO, as
            in AReaL, arXiv 2505.24298).
        log_ratio: t - old, the log of the loss's own importance ratio; `ratio` is that ratio without a gradient.
        advantages: A, times the weight of the correction.

    `correction` is for what the trainer and the sampler disagree on. With rho = exp(p - i), or exp(t - i) without
    `proximal`, never with a gradient:

    - `tis`: A is multiplied by min(rho, cap) (truncated importance sampling, fengyao.notion.site/off-policy-rl). Only
      where the loss has no ratio to the sampler itself: with `proximal`, or for a loss without a ratio.
    - `icepop`: tokens with rho outside [low, high] leave the loss, regularisers and entropy too; they stay in N. Of the
      others A is multiplied by rho, where `tis` would be allowed (IcePop, arXiv 2510.18855).
    - `sequence`: all tokens of a sequence leave, if the geometric mean of rho over its members is outside [low, high].

    Metrics over members: `correction/share` (of tokens that were capped or left), `correction/rho`,
    `correction/rho/max`.

    Raises ValueError for `tis` beside the loss's own ratio to the sampler, and for inputs without advantages or
    without proximal logprobs or entropy where these are read.
    """

    def __init__(
        self,
        inputs: LossInputs,
        *,
        has_ratio: bool = True,
        entropy_coef: float = 0.0,
        agg_mode: str = "token_mean",
        constant_length: int | None = None,
        proximal: bool = False,
        correction: str = "none",
        correction_cap: float = 2.0,
        correction_low: float = 0.5,
        correction_high: float = 5.0,
        entropy_target: float | None = None,  # these two are for the trainer, which changes entropy_coef
        entropy_step: float = 0.0,
    ):
        if inputs.advantages is None:
            raise ValueError("the rl loss needs advantages, but this sequence has none")
        if correction == "tis" and has_ratio and not proximal:
            raise ValueError("correction=tis: this loss has a ratio to the sampler, which tis would count twice")
        anchor = inputs.proximal_logprobs if proximal else inputs.trainer_logprobs.detach()
        if anchor is None:
            raise ValueError("proximal: these LossInputs have no proximal_logprobs")
        self.inputs = inputs
        self.members = inputs.members(sampler=True)
        self.counted = self.members
        self.entropy_coef, self.agg_mode, self.constant_length = entropy_coef, agg_mode, constant_length
        metrics: TokenMetrics = {}
        weight: Tensor | float = 1.0
        if correction != "none":
            log_rho = select(self.counted, anchor) - select(self.counted, inputs.inference_logprobs)
            rho = log_rho.exp()
            if correction == "tis":
                weight = rho.clamp_max(correction_cap)
                corrected = rho > correction_cap
            else:
                measure = self.sequence_mean(log_rho).exp() if correction == "sequence" else rho
                self.members = self.counted & (measure >= correction_low) & (measure <= correction_high)
                corrected = self.counted & ~self.members
                if correction == "icepop" and (proximal or not has_ratio):
                    weight = select(self.members, rho)
            metrics["correction/share"] = (corrected, self.counted)
            metrics["correction/rho"] = metrics["correction/rho/max"] = (rho, self.counted)
        self.metrics = metrics
        self.logprobs = select(self.members, inputs.trainer_logprobs)
        self.old = select(self.members, anchor if proximal else inputs.inference_logprobs)
        self.log_ratio = self.logprobs - self.old
        self.ratio = self.log_ratio.detach().exp()
        self.advantages = select(self.members, inputs.advantages) * weight

    def sequence_mean(self, values: Tensor) -> Tensor:
        """For each token the mean of `values`, 0 off the members, over the members of its sequence; no gradient."""
        size = self.inputs.sequence_sum(self.members.to(values.dtype)).clamp_min(1)
        return self.inputs.sequence_sum(values.detach()) / size

    def terms(self, loss: Tensor, metrics: TokenMetrics, excluded: dict[str, Tensor] | None = None) -> TokenTerms:
        """Return what an rl loss returns: `loss` minus `entropy_coef` times the entropy, weighted and averaged.

        With N member tokens in S sequences over the whole update, all envs and ranks, and n of them in one sequence,
        the rl term of L becomes, by `agg_mode`:

        - `token_mean`: the sum over tokens / N. Source: DAPO (arXiv 2503.14476).
        - `sequence_mean`: the sum over sequences of (the sum over its tokens / n), / S. Source: GRPO (arXiv
          2402.03300).
        - `rollout_mean`: the same with all sequences of a rollout as one: a history that broke counts once.
        - `constant`: the sum over tokens / (`constant_length` * S). Source: Dr. GRPO (arXiv 2503.20783).

        N and S count the tokens and sequences of all rl losses of the update, whatever their `agg_mode`. So each
        sequence counts as if the whole update had its mode, and envs with different modes do not change each other's
        gradient.

        Raises ValueError for another mode, and for `constant` without its length.
        """
        inputs, mode = self.inputs, self.agg_mode
        if self.entropy_coef:
            if inputs.entropy is None:
                raise ValueError("entropy_coef: these LossInputs have no entropy")
            loss = loss - self.entropy_coef * select(self.members, inputs.entropy)
        loss = weighted(inputs, self.members, loss)
        if mode == "rollout_mean" and inputs.rollout_share is not None:
            loss = loss * (inputs.mean_length * inputs.rollout_share.to(loss.dtype))
        elif mode in ("sequence_mean", "rollout_mean"):  # without shares each rollout is one sequence
            loss = loss * (inputs.mean_length / inputs.sequence_sum(self.counted.to(loss.dtype)).clamp_min(1))
        elif mode == "constant" and self.constant_length is not None:
            loss = loss * (inputs.mean_length / self.constant_length)
        elif mode != "token_mean":
            raise ValueError(f"agg_mode={mode!r} with constant_length={self.constant_length}: only constant needs one")
        left = {"corrected": self.counted & ~self.members} if self.metrics else {}
        return TokenTerms(loss, metrics | self.metrics, left | (excluded or {}))
