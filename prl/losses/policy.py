"""Parts that all rl losses share: the tokens that they are computed on, corrections, the entropy bonus."""

from torch import Tensor

from prl.losses.interface import LossInputs, TokenTerms, importance_weighted, mismatch_kl, select, weighted
from prl.losses.options import PolicyOptions

TokenMetrics = dict[str, tuple[Tensor, Tensor]]


class PolicyTokens:
    """The tokens of an rl loss, and the terms that are made of its value for each of them.

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

    def __init__(self, inputs: LossInputs, options: PolicyOptions):
        if inputs.advantages is None:
            raise ValueError("the rl loss needs advantages, but this sequence has none")
        if options.correction == "tis" and not options.may_weigh:
            raise ValueError("correction=tis: this loss has a ratio to the sampler, which tis would count twice")
        # The policy that is compared with the sampler, in place of the one that is being optimised.
        anchor = inputs.proximal_logprobs if options.proximal else inputs.trainer_logprobs.detach()
        if anchor is None:
            raise ValueError("proximal: these LossInputs have no proximal_logprobs")
        self.inputs = inputs
        self.options = options
        self.members = inputs.members(sampler=True)
        self.counted = self.members  # those of N: what a correction takes out of `members` stays here
        self.metrics: TokenMetrics = {}
        weight = 1.0 if options.correction == "none" else self._corrected(anchor)
        self.logprobs = select(self.members, inputs.trainer_logprobs)
        self.old = select(self.members, anchor if options.proximal else inputs.inference_logprobs)
        self.log_ratio = self.logprobs - self.old
        self.ratio = self.log_ratio.detach().exp()
        self.advantages = select(self.members, inputs.advantages) * weight

    def _corrected(self, anchor: Tensor) -> Tensor | float:
        """Take out of `members` the tokens that the correction drops. Returns the weight of advantages."""
        options = self.options
        weight: Tensor | float = 1.0
        # By the anchor, which has no gradient: a correction weighs the data, and is not optimised.
        log_rho = select(self.counted, anchor) - select(self.counted, self.inputs.inference_logprobs)
        rho = log_rho.exp()
        if options.correction == "tis":
            weight = rho.clamp_max(options.correction_cap)
            corrected = rho > options.correction_cap
        else:
            measure = self.sequence_mean(log_rho).exp() if options.correction == "sequence" else rho
            self.members = self.counted & (measure >= options.correction_low) & (measure <= options.correction_high)
            corrected = self.counted & ~self.members
            # Masking alone goes with any loss. The weight would count twice beside the loss's own ratio.
            if options.correction == "icepop" and options.may_weigh:
                weight = select(self.members, rho)
        self.metrics["correction/share"] = (corrected, self.counted)
        self.metrics["correction/rho"] = (rho, self.counted)
        self.metrics["correction/rho/max"] = (rho, self.counted)
        return weight

    importance_weighted = staticmethod(importance_weighted)

    @property
    def moved(self) -> Tensor:
        """Return d = exp(t) - exp(old), the change of each token's probability, without a gradient."""
        return self.logprobs.detach().exp() - self.old.exp()

    @property
    def mismatch(self) -> Tensor:
        """Return the k3 estimate of the KL by the loss's own ratio."""
        return mismatch_kl(self.log_ratio)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average `values`, 0 off the members, over the members of each token's sequence, `[tokens]`; no gradient."""
        size = self.inputs.sequence_sum(self.members.to(values.dtype)).clamp_min(1)
        return self.inputs.sequence_sum(values.detach()) / size

    def terms(self, loss: Tensor, metrics: TokenMetrics, excluded: dict[str, Tensor] | None = None) -> TokenTerms:
        """Return what an rl loss returns: `loss` minus `entropy_coef` times the entropy, weighted, and how to average.

        Args:
            loss: of each token, `[tokens]`, finite off the members.
            metrics: the loss's own, as in `TokenTerms`.
            excluded: as in `TokenTerms`.
        """
        options = self.options
        if options.entropy_coef:
            if self.inputs.entropy is None:
                raise ValueError("entropy_coef: these LossInputs have no entropy")
            loss = loss - options.entropy_coef * select(self.members, self.inputs.entropy)
        # There are metrics of its own only where a correction has looked at the tokens.
        left = {"corrected": self.counted & ~self.members} if self.metrics else {}
        return TokenTerms(
            weighted(self.inputs, self.members, loss),
            metrics | self.metrics,
            left | (excluded or {}),
            options.agg_mode,
            options.constant_length,
        )
