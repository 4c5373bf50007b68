"""The metrics of the trainer, each declared once (`prl.tools.report.catalogue` has those of all)."""

from prl.monitors.metric_names import Metric

TRAINER = (
    Metric("loss/mean", "nats/token", "The loss L: the sum of its components' terms."),
    Metric("loss/<component>", "nats/token", "The component's term of L: its sum divided by its member tokens."),
    Metric(
        "grad_norm",
        "1",
        "Norm of the gradient before clipping.",
        healthy="finite and steady; spikes: lower the rate",
    ),
    Metric("lr", "1", "Learning rate of the step, of `trainer.optim` itself."),
    Metric(
        "entropy/<env>/mean",
        "nats/token",
        "Entropy of the policy at trained tokens.",
        all=True,
        healthy="falls slowly; below a tenth of its first value exploration is over",
    ),
    Metric(
        "mismatch_kl/<env>/mean",
        "nats/token",
        "Mean rho - log rho - 1 over rl and ref_kl members.",
        all=True,
        healthy="below 0.01; near 0 on-policy",
    ),
    Metric("log_ratio/<env>/<quantile>", "nats", "log rho, the trainer's minus the sampler's logprob, over the same."),
    Metric(
        "logprob_gap/mean",
        "nats/token",
        "Mean absolute difference of the trainer's and the sampler's logprobs.",
        healthy="on-policy about 1e-6 in float32; 1e-3 to 1e-2 is to be expected in bfloat16",
    ),
    Metric("tokens/trained", "tokens", "Tokens that feed a component."),
    Metric(
        "tokens/forward",
        "tokens",
        "Tokens that went through the model; what several sequences begin with counts once.",
    ),
    Metric("tokens/<component>", "tokens", "Member tokens of the component."),
    Metric(
        "tokens/invalid_logprobs",
        "tokens",
        "Left out of the loss: the sampler's logprob is missing or not finite.",
        healthy="0",
    ),
    Metric("samples/truncated", "samples", "Cut to trainer.seq_len.", healthy="0; else raise trainer.seq_len"),
    Metric("samples/rl", "samples", "With a token that feeds rl; what agg_mode divides by."),
    Metric("time/train", "s", "The training step."),
    Metric(
        "time/wait_for_batch",
        "s",
        "The trainer's wait for the batch.",
        healthy="small beside time/train; else generation is the bottleneck",
    ),
    Metric(
        "idle/trainer",
        "share",
        "Of the time from the end of the last update to the end of this one: waiting for the batch. Of rank 0; not "
        "of the first step after a start.",
        healthy="below 0.2, or below idle/engine; else generation is the bottleneck",
    ),
    Metric("masked_mismatch_kl", "nats/token", "loss=default: mismatch over tokens dropped by the mask."),
    Metric("unmasked_mismatch_kl", "nats/token", "loss=default: mismatch over tokens kept."),
    Metric(
        "is_masked",
        "share",
        "loss=default: tokens that the mask drops from the policy gradient.",
        healthy="below 0.05",
    ),
    Metric("is_masked_low", "share", "loss=default: dropped at dppo_mask_low."),
    Metric("is_masked_high", "share", "loss=default: dropped at dppo_mask_high."),
    Metric("masked_advantage_positive", "share", "loss=default: positive advantages among dropped tokens."),
    Metric("masked_advantage_negative", "share", "loss=default: other advantages among dropped tokens."),
    Metric("importance_ratio", "1", "loss=aipo: mean of rho, the trainer's over the sampler's probability."),
    Metric("clipped_importance_ratio", "1", "loss=aipo: mean of rho clipped at delta."),
    Metric("is_clipped", "share", "loss=aipo: tokens with rho above delta. loss=gspo: tokens of clipped sequences."),
    Metric("sequence_ratio", "1", "loss=gspo: mean of the sequences' importance ratios."),
    Metric("nll", "nats/token", "ce: mean of -log p, without weights."),
    Metric(
        "ref_kl",
        "nats/token",
        "ref_kl: mean of the reference's minus the trainer's logprob; minus the k1 estimate of the KL.",
    ),
    Metric("ref_kl/<env>/mean", "nats/token", "ref_kl: the same for an env, each token counting once."),
    Metric("ref_kl/is_masked", "share", "ref_kl: tokens that its mask drops."),
    Metric("ref_kl/masked_mismatch_kl", "nats/token", "ref_kl: mismatch over tokens dropped."),
    Metric("ref_kl/unmasked_mismatch_kl", "nats/token", "ref_kl: mismatch over tokens kept."),
    Metric("rl/<metric>", "the loss's", "A metric of a user's rl loss whose name another component takes."),
)
"""Of the step itself, reduced over ranks."""
