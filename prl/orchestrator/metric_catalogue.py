"""The catalogue of all metrics that a run writes to `metrics.jsonl`, each declared once: key, unit, meaning, range.

`<env>` in a key stands for an env's name, and in keys marked `all` also for `all`, all envs together. Other words in
angle brackets stand for names that the env, the filter, the loss component or the user's loss gives. A user's own loss
adds keys of its own, which are not listed.
"""

import re
from dataclasses import dataclass

from prl.rollouts.rollout import ERROR_KINDS
from prl.wire.components import COMPONENTS
from prl.wire.metric_names import QUANTILES


@dataclass(frozen=True)
class Metric:
    """One entry: a key pattern, its unit, and what the number means."""

    key: str
    unit: str
    meaning: str
    all: bool = False
    """Whether `<env>` may be `all`."""
    healthy: str = ""
    """Where it should be, and what to do where it is not; empty where nothing can be said of every run."""

    def matches(self, key: str) -> bool:
        """Whether `key` is one of the keys that the pattern stands for."""
        patterns = {
            "<env>": "[^/]+" if self.all else "(?!all/)[^/]+",
            "<kind>": "|".join(ERROR_KINDS),
            "<component>": "|".join(COMPONENTS),
            "<pool>": "easy|normal|hard",
            "<quantile>": "|".join(QUANTILES),
        }
        parts = re.split(r"(<\w+>)", self.key)
        found = [f"({patterns.get(part, '.+')})" if part.startswith("<") else re.escape(part) for part in parts]
        return re.fullmatch("".join(found), key) is not None


CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "Orchestrator": (
        Metric("step", "steps", "Training step; 0 is the base model, before training."),
        Metric(
            "reward/<env>/mean",
            "reward",
            "Mean reward of the step's rollouts, filtered ones included.",
            all=True,
            healthy="rises",
        ),
        Metric("reward/<env>/arrived", "reward", "Mean reward of all graded rollouts since the last step.", all=True),
        Metric("length/<env>/mean", "tokens", "Sampled tokens per rollout.", all=True),
        Metric("reward/<env>/<quantile>", "reward", "min, p10, p50, p90, max over the rollouts of the mean.", all=True),
        Metric("length/<env>/<quantile>", "tokens", "Likewise.", all=True),
        Metric("advantage/<env>/<quantile>", "advantage", "Likewise, of a rollout's mean advantage.", all=True),
        Metric("off_policy/<env>/<quantile>", "versions", "Likewise, the ages in the batch.", all=True),
        Metric(
            "truncated/<env>",
            "share",
            "Rollouts that a length limit cut off.",
            all=True,
            healthy="below 0.1; where higher, max_tokens is too low or replies run on",
        ),
        Metric("metric/<env>/<metric>", "the env's", "Mean of a metric of the env; a rollout without it counts as 0."),
        Metric(
            "off_policy/mean",
            "versions",
            "Mean age of the batch's live-policy rollouts: step - 1 - start version.",
            healthy="near max_async_level or below; stragglers raise it, up to max_off_policy_steps",
        ),
        Metric("off_policy/max", "versions", "Largest such age."),
        Metric(
            "off_policy/token_mean",
            "versions",
            "Mean age of the batch's sampled tokens, from the start of the model call that sampled each.",
            healthy="at most off_policy/mean: later turns start from newer versions",
        ),
        Metric("off_policy/token_max", "versions", "Largest such age."),
        Metric(
            "off_policy/token_updated",
            "share",
            "Of these tokens, those whose call lived through an update: they may be of the newer version.",
        ),
        Metric(
            "off_policy/dropped",
            "rollouts",
            "Dropped as too old for any later step (max_off_policy_steps), in flight or waiting.",
            healthy="below 5 % of rollouts/arrived",
        ),
        Metric("off_policy/dropped_tokens", "tokens", "Sampled tokens of those, as far as they had arrived."),
        Metric("rollouts/batch", "rollouts", "With a place in the cut batches since the last step."),
        Metric("batch/<env>/share", "share", "The env's part of `rollouts/batch`; of tokens with token_batch_size."),
        Metric("rollouts/trained", "rollouts", "Of which at least one token trains."),
        Metric("rollouts/filtered", "rollouts", "Dropped by an enforced filter of either slot."),
        Metric("rollouts/arrived", "rollouts", "Finished since the last step, failed ones included."),
        Metric(
            "rollouts/errored",
            "rollouts",
            "Failed since the last step.",
            healthy="0; above 1 % of rollouts/arrived look at errors/",
        ),
        Metric(
            "rollouts/surplus",
            "rollouts",
            "Dropped because a batch was full: with oversampling at limit = k, and after the last step.",
        ),
        Metric("rollouts/surplus_tokens", "tokens", "Sampled tokens of those, as far as they had arrived."),
        Metric("errors/<env>/<kind>", "rollouts", "Failed since the last step, by kind.", all=True),
        Metric(
            "filters/<env>/is_filtered",
            "share",
            "Of the cut batch, dropped by the post_batch slot.",
            all=True,
            healthy="below 0.5; else much of the batch teaches nothing",
        ),
        Metric(
            "filters/<env>/is_matched", "share", "Likewise, matched by any filter, monitoring ones included.", all=True
        ),
        Metric(
            "filters/<env>/<filter>",
            "share",
            "Likewise, matched first by this filter, enforced or not.",
            all=True,
            healthy="zero_advantage below 0.8; else buffer=odf or other tasks",
        ),
        Metric(
            "pre_filters/<env>/is_filtered", "share", "Of all active rollouts, dropped by the pre_batch slot.", all=True
        ),
        Metric(
            "pre_filters/<env>/is_matched", "share", "Likewise, matched by any filter, monitoring ones too.", all=True
        ),
        Metric(
            "pre_filters/<env>/<filter>", "share", "Likewise, matched first by this filter, enforced or not.", all=True
        ),
        Metric("filtered_rollouts/<env>/<pool>", "rollouts", "Dropped by online difficulty filtering as easy or hard."),
        Metric("pool/<env>/<pool>", "share", "Tasks in each difficulty pool."),
        Metric("evicted_examples/<env>/<pool>", "tasks", "Retired to the pool since the last step."),
        Metric("evicted_examples/<env>/<pool>_rate", "share", "The same, of the groups finished since the last step."),
        Metric("tokens/generated", "tokens", "Sampled by all rollouts that finished since the last step."),
        Metric("tokens/generated_per_second", "tokens/s", "The same per second of `time/step`."),
        Metric("tokens/trained_per_second", "tokens/s", "`tokens/trained` per second of `time/step`."),
        Metric("time/rollout", "s", "Collecting the batch, without waiting for a policy or for frozen models."),
        Metric(
            "time/wait_for_policy",
            "s",
            "Collecting the batch with nothing in flight: waiting for the trainer.",
            healthy="small beside time/step; else the update is the bottleneck",
        ),
        Metric("time/scoring", "s", "Mean time in which an algorithm scored a rollout on arrival."),
        Metric(
            "time/update_weights",
            "s",
            "Loading this step's version into the engines; absent where they skipped it or started with it.",
        ),
        Metric(
            "engine/restarts",
            "starts",
            "How often engines of the run have died and were started again, so far, all together.",
            healthy="0; logs/inference*.log say why one died",
        ),
        Metric(
            "engine/requests_reissued", "requests", "Requests and updates that were sent again because of it, so far."
        ),
        Metric("time/step", "s", "From the line of the step before to this one."),
        Metric(
            "idle/engine",
            "share",
            "Of `time/step`: no request of the run was in flight, and no weights were loaded; the mean over servers.",
            healthy="below 0.2; else the trainer, tools or graders hold it up: a larger max_async_level, or batch_size",
        ),
    ),
    "Evaluation": (
        Metric(
            "eval/<env>/avg@<k>",
            "reward",
            "Mean over held-out tasks, k samples each; a failed rollout counts as 0.",
            healthy="rises with the sampled reward",
        ),
        Metric("eval/<env>/errored", "share", "Rollouts of the evaluation that failed."),
        Metric("eval/<env>/<metric>", "the env's", "Mean of a metric of the env; a failed rollout counts as 0."),
        Metric("eval/<env>/pass@<k>", "share", "prl.eval: probability that one of k samples of a task is correct."),
    ),
    "Trainer": (
        Metric("loss/mean", "nats/token", "The loss L: the sum of its components' terms."),
        Metric("loss/<component>", "nats/token", "The component's term of L: its sum divided by its member tokens."),
        Metric(
            "grad_norm",
            "1",
            "Norm of the gradient before clipping.",
            healthy="finite and steady; spikes: lower the rate",
        ),
        Metric("lr", "1", "Learning rate of the step."),
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
        Metric(
            "log_ratio/<env>/<quantile>", "nats", "log rho, the trainer's minus the sampler's logprob, over the same."
        ),
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
        Metric(
            "is_clipped", "share", "loss=aipo: tokens with rho above delta. loss=gspo: tokens of clipped sequences."
        ),
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
    ),
}


def metric_of(key: str) -> Metric | None:
    """The entry of a key, the most specific one; None for a key that is not in the catalogue."""
    found = [metric for metrics in CATALOGUE.values() for metric in metrics if metric.matches(key)]
    return max(found, key=lambda metric: len(re.sub(r"<\w+>", "", metric.key)), default=None)


def catalogue_markdown() -> str:
    """The catalogue as Markdown tables, one for each process that measures."""
    parts = []
    for title, metrics in CATALOGUE.items():
        rows = [f"| `{metric.key}` | {metric.unit} | {metric.meaning} | {metric.healthy} |" for metric in metrics]
        parts.append("\n".join([f"### {title}", "", "| key | unit | meaning | healthy |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":  # python -m prl.orchestrator.metric_catalogue > prl/METRICS.md
    print(catalogue_markdown(), end="")
