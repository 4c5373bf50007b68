"""The metrics of orchestrator and evaluation, each declared once (`prl.tools.report.catalogue` has those of all)."""

from prl.monitors.metric_names import Metric

ORCHESTRATOR = (
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
    Metric("filters/<env>/is_matched", "share", "Likewise, matched by any filter, monitoring ones included.", all=True),
    Metric(
        "filters/<env>/<filter>",
        "share",
        "Likewise, matched first by this filter, enforced or not.",
        all=True,
        healthy="zero_advantage below 0.8; else curriculum=odf or other tasks",
    ),
    Metric(
        "pre_filters/<env>/is_filtered", "share", "Of all active rollouts, dropped by the pre_batch slot.", all=True
    ),
    Metric("pre_filters/<env>/is_matched", "share", "Likewise, matched by any filter, monitoring ones too.", all=True),
    Metric("pre_filters/<env>/<filter>", "share", "Likewise, matched first by this filter, enforced or not.", all=True),
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
        healthy="0; logs/engine*.log say why one died",
    ),
    Metric("engine/requests_reissued", "requests", "Requests and updates that were sent again because of it, so far."),
    Metric("time/step", "s", "From the line of the step before to this one."),
    Metric(
        "idle/engine",
        "share",
        "Of `time/step`: no request of the run was in flight, and no weights were loaded; the mean over servers.",
        healthy="below 0.2; else the trainer, tools or graders hold it up: a larger max_async_level, or batch_size",
    ),
)
"""Of collecting, filtering and shipping a batch."""

EVALUATION = (
    Metric(
        "eval/<env>/avg@<k>",
        "reward",
        "Mean over held-out tasks, k samples each; a failed rollout counts as 0.",
        healthy="rises with the sampled reward",
    ),
    Metric("eval/<env>/errored", "share", "Rollouts of the evaluation that failed."),
    Metric("eval/<env>/<metric>", "the env's", "Mean of a metric of the env; a failed rollout counts as 0."),
    Metric("eval/<env>/pass@<k>", "share", "prl.eval: probability that one of k samples of a task is correct."),
)
"""Of held-out tasks."""
