"""Suggest what to write instead of a retired or misspelt key or option."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeGuard

from omegaconf import DictConfig, OmegaConf

from prl.config.model_reference import KEYS

SLOTS = (
    "filters.pre_batch.<name>… and filters.post_batch.<name>…; "
    "filters=default|monitor|enforce|enforce_post|none fills both"
)

INSTEAD = {
    "algorithms are a config group: algo=grpo, algo=opd, …": (
        "training_mode orchestrator.training_mode trainer.training_mode algorithm algo.name algo.type advantage.type "
        "algo.advantage.type"
    ),
    "the algorithm is a top-level node: algo": "orchestrator.algo",
    "credit belongs to the algorithm: algo": "advantage orchestrator.advantage algo.advantage",
    "algo.length_penalty=tokens or algo.length_penalty=turns, of an algorithm that reads rewards": (
        "length_penalty orchestrator.length_penalty"
    ),
    "algo=echo; what it trains on is algo.roles": "echo echo.observations orchestrator.echo",
    "algo.roles (of algo=echo)": "algo.observations",
    "the model being trained is `model`": "student orchestrator.student",
    "the run's own engine is `inference`; one that runs already is inference.urls": "client orchestrator.client",
    "inference.servers, each of inference.tensor_parallel_size GPUs": (
        "inference.data_parallel_size inference.num_servers inference.replicas inference.num_engines"
    ),
    "teacher=endpoint teacher.name=… teacher.base_url=…; to host one, teacher=local teacher.model.path=…": (
        "teacher.client teacher_model"
    ),
    "a teacher belongs to the algorithm that uses it: algo.teacher; the group teacher=local|endpoint fills it": (
        "orchestrator.teacher"
    ),
    "teacher=local hosts one; its server's settings are teacher.inference": "inference.teacher",
    "the frozen model has the name that the algorithm gives it: algo.teacher (opd), algo.sampling.source (sft)": (
        "algo.model"
    ),
    "the weight of the KL to a reference is algo.kl.coef, the reference algo.kl.reference": (
        "kl_coef kl_beta algo.kl_coef algo.kl_beta algo.beta loss.kl_coef loss.kl_beta loss.beta trainer.kl_coef"
    ),
    "sampling.temperature, or envs.<name>.sampling.temperature for one env": "algo.sampling.temperature",
    "sampling.max_tokens, or envs.<name>.sampling.max_tokens for one env": "algo.sampling.max_tokens",
    "sampling is a group of its own: sampling.temperature, sampling.max_tokens, …": "orchestrator.sampling",
    "orchestrator.eval.sampling.temperature": "orchestrator.eval.temperature",
    "orchestrator.eval": "eval",
    f"filters are a group of their own: {SLOTS}": "orchestrator.filters",
    f"filters.pre_batch.<name>…; {SLOTS}": "pre_batch_filters orchestrator.pre_batch_filters",
    f"filters.post_batch.<name>…; {SLOTS}": "post_batch_filters orchestrator.post_batch_filters",
    "the buffer is a group of its own: buffer=default|pools|odf|pools_odf, buffer.easy_threshold…": (
        "orchestrator.buffer"
    ),
    "orchestrator.oversampling_factor": "buffer.oversampling_factor oversampling_factor",
    "buffer.online_difficulty_filtering": "online_difficulty_filtering orchestrator.online_difficulty_filtering",
    "the model is a top-level node: model": "orchestrator.model trainer.model",
    "model.path": "model.name",
    "an algorithm's loss component is part of its class; the rl loss is chosen with loss=<name>": "algo.loss",
    "the rl loss is chosen with loss=<name>": "loss.type loss.name",
    "a function of your own is named by its dotted path: loss=custom loss._target_=…": "loss.import_path",
    "a class of your own is named by its dotted path: algo=custom_class algo._target_=…": "algo.import_path",
    "monitors have settings by name: monitor.console.mode": "monitor.show",
    "a loss takes its keyword arguments as keys of its own: +loss.<name>=<value>": "loss.kwargs",
    "a class takes its knobs as keys of its own: +algo.<name>=<value>": "algo.kwargs",
    "a function takes its keyword arguments as keys of its own: +algo.fn.<name>=<value>": "algo.fn.kwargs",
    "a function takes its keyword arguments as keys of its own: +algo.filter.<name>=<value>": "algo.filter.kwargs",
    "a renderer takes its settings as keys of its own: +renderer.<name>=<value>": "renderer.args",
    "the loss is a top-level node: loss": "trainer.loss",
    "orchestrator.batch_size": "batch_size",
    "orchestrator.group_size": "group_size rollouts_per_example orchestrator.rollouts_per_example",
    "orchestrator.max_async_level and orchestrator.oversampling_factor bound what is in flight": (
        "max_inflight_rollouts orchestrator.max_inflight_rollouts"
    ),
    "orchestrator.max_async_level": (
        "async_level orchestrator.async_level trainer.async_level max_async_level trainer.max_async_level"
    ),
    "orchestrator.max_off_policy_steps": "max_off_policy_steps",
    "trainer.optim.lr": "lr trainer.lr",
    "trainer.max_grad_norm": "trainer.optim.max_grad_norm",
    "trainer.optim._target_, e.g. torch.optim.SGD": "trainer.optim.type",
    "checkpoint.every": "trainer.checkpoint_every checkpoint_every save_every",
    "run.dir": "hydra.run.dir",
    "run.resume=<run or checkpoint>, or run.resume=auto": "resume resume_from trainer.resume checkpoint.resume",
    "trainer.seq_len": "seq_len",
    "trainer.token_export": (
        "enable_token_export trainer.enable_token_export orchestrator.enable_token_export monitor.token_export"
    ),
    "monitor.wandb.project, with monitor=wandb": "monitor.wandb_project",
    "monitor=wandb, and its settings monitor.wandb.…": "wandb orchestrator.wandb trainer.wandb",
    "envs.<name>.taskset": "env.id",
    "envs are a config group: env=math, env=[math,reverse_text]": "environment",
}
"""What to write instead of the keys of other versions of such systems, and of earlier ones of this."""

RETIRED = {key: hint for hint, keys in INSTEAD.items() for key in keys.split()}

RETIRED_OPTIONS = {
    (
        "algo",
        "ref_kl",
    ): (
        "ref_kl is a loss component; the algorithms that feed it are algo=opd and algo=opsd; algo.kl.coef adds it to rl"
    ),
    ("algo", "ppo"): "the clipped loss is loss=default; group credit is algo=grpo",
    ("monitor", "default"): "jsonl and console are always there; monitor=wandb adds Weights & Biases",
    ("loss", "dppo"): "loss=default is the DPPO-masked loss",
}


def misused_groups(arguments: list[str], groups: dict[str, list[str]]) -> str | None:
    """What is wrong with the options chosen for groups, where Hydra would say it badly or not at all."""
    given = [argument.split("=", 1) for argument in arguments]
    for group, value in ((group, value.strip()) for group, value in given if group in groups):
        if hint := RETIRED_OPTIONS.get((group, value)):
            return f"there is no {group}={value}: {hint}"
        if value in ("null", ""):
            why = (
                ", or leave it out: there is none by default"
                if group in ("experiment", "debug")
                else "; there is always one"
            )
            return f"{group}={value}: choose an option of {group}{why}"
        names = [name.strip() for name in value.strip("[]").split(",")]
        if value.startswith("[") and len(set(names)) < len(names):
            return (
                f"{group}={value}: an option stands there twice (+env@envs.<name>=<option> adds it under another name)"
            )
    counts = Counter(group for group, _ in given if group in groups)
    twice = next((group for group, count in counts.items() if count > 1), None)
    return None if twice is None else f"{twice} is given twice; for several envs write env=[a,b]"


def misspelt_option(argument: str, groups: dict[str, list[str]]) -> list[str]:
    """A hint for an option that its group does not have but nearly does: renderer=glm5."""
    key, equals, value = argument.partition("=")
    group = override_key(key).split("@")[0]
    if not equals or group not in groups or value in groups[group] or value.startswith(("[", "$")):
        return []
    letters = {re.sub(r"[-_.]", "", name): name for name in groups[group]}
    near = difflib.get_close_matches(re.sub(r"[-_.]", "", value), letters, n=1)
    return [f"{group}={value}: did you mean {group}={letters[near[0]]}?"] if near else []


def override_key(argument: str) -> str:
    """The config key of a command-line override, without Hydra's `+`, `++` and `~`."""
    return argument.split("=", 1)[0].lstrip("+~")


def retired(key: str) -> str | None:
    """What to write instead of `key` or of the retired node that it lies in."""
    nodes = [key.rsplit(".", up)[0] for up in range(key.count(".") + 1)]  # from the key itself outwards
    return next((RETIRED[node] for node in nodes if node in RETIRED), None)


def misspelt(argument: str, config: DictConfig, groups: Iterable[str]) -> list[str]:
    """Hints for an override of a key that `config` does not have, or of a node that has keys of its own."""
    key, (_, equals, value) = override_key(argument), argument.partition("=")
    value = value.strip()
    if not equals or argument.startswith("+") or key in groups or key.startswith("hydra.") or "@" in key or "/" in key:
        return []
    known, parts = flatten(config), key.split(".")
    heads = [parts[:end] for end in range(len(parts), 0, -1)]
    prefix = next((head for head in heads if has_keys(known.get(".".join(head)))), [])
    node = known[".".join(prefix)] if prefix else config
    if key in known and (prefix != parts or value == "null" or value.startswith(("{", "${"))):
        return []
    names = sorted(str(name) for name in node if not str(name).startswith("_"))
    listed = [f"keys of {'.'.join(prefix) or 'the top level'}: {', '.join(names)}"] if names else []
    if key in known:
        return [f"{key}: did you mean {key}._target_?"] if "_target_" in list(node) else listed
    missing = parts[len(prefix)]
    if prefix == parts[:2] and parts[0] == "envs" and missing in ("algo", "loss", "filters", "renderer", "buffer"):
        chosen = f"+{missing}@{'.'.join(prefix)}.{missing}=<name>"
        return [f"{key}: an env's own {missing} is chosen with {chosen}, and has its keys then", *listed]
    parent = ".".join([*prefix, missing])
    if missing in names and known[parent]._is_none():
        if known[parent]._metadata.ref_type is Any:
            return [f"{key}: {parent} has no keys yet, and takes a +: +{key}={value}"]
        given = value if parts[-1] == "type" else "<value>"
        return [f"{key}: {parent} has no keys, it takes a value: {parent}={given}"]
    if missing == "import_path" and "_target_" in list(node):
        return [f"{key}: code of your own is named by its dotted path: {'.'.join(prefix)}._target_={value}"]
    if prefix == ["monitor"]:
        return [f"{key}: {missing} is not among this run's monitors; choose it with monitor={missing}", *listed]
    free = OmegaConf.get_type(node) is dict and prefix != ["envs"] and set(names) != set(KEYS)
    if free and not difflib.get_close_matches(missing, names):
        return [f"{key}: a key that is not there yet takes a +: +{key}={value}", *listed]
    meant = {*known, *groups} - {".".join(prefix[:end]) for end in range(1, len(prefix) + 1)}  # not what it lies in
    close = difflib.get_close_matches(key, meant, n=3, cutoff=0.7)
    close += [other for other in sorted(meant) if other.split(".")[-1] == parts[-1] and other not in close]
    return [*([f"{key}: did you mean {' or '.join(close[:4])}?"] if close else []), *listed]


def flatten(config: DictConfig, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a config, with its node."""
    found: dict[str, Any] = {}
    for name in map(str, config):
        child = found[prefix + name] = config._get_node(name)
        if has_keys(child):
            found |= flatten(child, f"{prefix}{name}.")
    return found


def has_keys(node: Any) -> TypeGuard[DictConfig]:
    """Whether a node is a mapping that is there."""
    return isinstance(node, DictConfig) and not node._is_none() and not node._is_missing()
