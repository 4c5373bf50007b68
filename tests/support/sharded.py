"""Training cases that several ranks and one process run alike."""

import functools
import json
import random
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from prl.base.checkpoint_folders import part_path
from prl.config.trainer import AdamWConfig
from prl.losses import aipo_loss, default_loss, gspo_loss
from prl.rollouts.components import COMPONENTS
from prl.rollouts.messages import MicroBatch, Origin, Reference, StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.trainer.checkpoint_part import load_state, take_part, write_part
from prl.trainer.lora import add_adapters
from prl.trainer.model import save_weights
from prl.trainer.trainer import Trainer
from prl.trainer.tree.attention import use_tree_attention

LOSSES = {
    "": functools.partial(default_loss, kl_tau=0.01),
    "aipo": aipo_loss,
    "gspo": functools.partial(gspo_loss, clip_ratio_low=0.3, clip_ratio_high=0.3, entropy_coef=0.1),
    "constant": functools.partial(default_loss, agg_mode="constant", constant_length=9),
}
STEPS, NEXT = (1, 2), 3
FED: dict[int, dict[str, float]] = {1: {"rl": 1.0, "ce": 0.5}, 2: {"ref_kl": 1.0}, 3: {"rl": 1.0, "ref_kl": 0.3}}
"""By group the weights of the components that it feeds; of others rl alone."""
REFERENCES = {
    "": Reference("initial"),
    "aipo": Reference("initial", "reverse_kl"),
    "gspo": Reference("initial", "forward_kl", prefix=(7, 8, 9)),
    "constant": Reference("initial", "jsd", 0.3, prefix=(5,)),
}
"""By loss what the samples of one group are compared with."""
FAR = AdamWConfig(lr=1e-3, eps=1e-4)
"""Takes weights so far from where they began that a wrong gradient shows in their sixth digit."""
SGD = {"_target_": "torch.optim.SGD", "lr": 1e-2, "momentum": 0.9, "fused": True}
MUON = {"match": "^(?!.*(embed|lm_head))", "dims": 2, "_target_": "torch.optim.Muon", "lr": 1e-2}
CASES = {
    "untied": {},
    "copies of two": {"tied": True, "shard_size": 2, "gradient_checkpointing": "selective"},
    "each a copy": {"shard_size": 1, "tied": True, "share_prefixes": False, "gradient_checkpointing": "full"},
    "ranks without a row": {"rows": 1, "tied": True, "cpu_offload": True},
    "another optimiser, a frozen layer": {"optim": SGD, "frozen": True},
    "Muon": {"optim": AdamWConfig(eps=1e-4, parts={"muon": MUON | {"adjust_lr_fn": "match_rms_adamw"}})},
    "float32": {"dtype": "float32", "optim": FAR},
    "several updates": {"updates_per_batch": 2, "epochs": 2},
    "adapters": {
        "lora": {"rank": 4, "alpha": 8.0, "target_modules": None},
        "tied": True,
        "gradient_checkpointing": "full",
    },
}
"""Options of the trainer; `tied`, `frozen`, `lora` and `dtype` of the model; `rows`, the most of a step."""
RANKS = {2: ["untied", "float32", "adapters", "several updates"], 4: list(CASES)}
"""What each number of ranks runs."""


def make_model(
    *, tied: bool = False, frozen: bool = False, meta: bool = False, dtype: str = "float64"
) -> Qwen3ForCausalLM:
    """Random weights; few of its sizes are multiples of the number of ranks."""
    torch.manual_seed(0)
    shape = {"hidden_size": 30, "intermediate_size": 50, "num_hidden_layers": 3, "vocab_size": 101, "head_dim": 10}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": tied, "initializer_range": 0.2}
    with torch.device("meta" if meta else "cpu"):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**shape, **heads), attn_implementation="sdpa")
    model.to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "layers.1" not in name)
    use_tree_attention(model)
    return model.train()


def make_samples(step: int) -> list[TrainingSample]:
    """Groups with a common prompt, which feed every loss and every component.

    What six digits of float32 can be asked of: terms of the loss that do not nearly cancel out, most are positive, and
    ratios to the sampler near 1, since temperatures make all tokens about as likely.
    """
    draw = random.Random(step)
    samples = []
    for group in range(6):
        prompt = [draw.randrange(101) for _ in range(6)]
        into = FED.get(group, {"rl": 1.0})
        for number, name in enumerate(LOSSES):
            length, far = draw.randrange(3, 14), draw.choice([4.1, 4.6, 5.1])
            mask = [False] * 6 + [True] * length
            on = [float(trains) for trains in mask]
            streams: dict = {f"{each}_weights": [into.get(each, 0.0) * this for this in on] for each in COMPONENTS}
            if "ref_kl" in into and group == 3:
                streams["reference"] = REFERENCES[name]
            elif "ref_kl" in into:
                streams["ref_logprobs"] = [-draw.uniform(7, 9) * each for each in on]
                if name == "aipo":
                    top = [[draw.randrange(4 * place, 4 * place + 4) for place in range(3)] for _ in on]
                    streams |= {"reference": Reference("", "forward_kl"), "top_ids": top}
                    streams["top_logprobs"] = [[-draw.uniform(1.5, 3) for _ in range(3)] for _ in on]
            samples.append(
                TrainingSample(
                    token_ids=prompt + [draw.randrange(101) for _ in range(length)],
                    mask=mask,
                    logprobs=[-draw.uniform(far - 0.3, far + 0.3) * each for each in on],
                    temperatures=[draw.choice([3.0, 4.0]) for _ in mask],
                    env_name=f"env{group % 2}",
                    reward=0.0,
                    loss=name,
                    origin=Origin(group, group, number // 3, "agent"),
                    advantages=[draw.choice([-2.0, 0.25]) * each for each in on],
                    **streams,
                )
            )
    return samples


def make_rows(step: int, most: int | None = None) -> list[MicroBatch]:
    """The samples as rows; `most` is the largest number of them."""
    return pack(make_samples(step), 60, 1)[0][0][:most]


def share_of(rows: list[MicroBatch], rank: int, ranks: int) -> list[MicroBatch]:
    """Half of the rows for the first rank, and half of the rest for each next; a dummy where none are left."""
    rows = rows[:1] if len(rows) == 1 and not rank else rows
    for _ in range(rank):
        rows = rows[(len(rows) + 1) // 2 :]
    own = rows if rank == ranks - 1 else rows[: (len(rows) + 1) // 2]
    return own or pack([], 60, 1)[0][0]


def make_trainer(
    *,
    tied=False,
    frozen=False,
    lora: dict | None = None,
    dtype: str = "float64",
    rank: int = 0,
    checkpoint: Path | None = None,
    **options,
) -> Trainer:
    options = {
        "device": "cpu",
        "tokens_per_forward": 70,
        "max_grad_norm": 0.3,
        "optim": AdamWConfig(lr=1e-3, eps=1e-4),
    } | options
    models = [make_model(tied=tied, frozen=frozen, meta=rank > 0, dtype=dtype) for _ in range(2)]
    with torch.no_grad():
        models[1].model.norm.weight *= 3  # a reference that finds most tokens less likely than the policy does
    if checkpoint is not None and not rank:
        saved = load_file(checkpoint / "model.safetensors")
        models[0].load_state_dict({name: weight.double() for name, weight in saved.items()})
    if lora is not None:
        give_adapters(models[0], lora)
    losses = LOSSES
    if "epochs" in options:
        further = {"proximal": True, "correction": "icepop", "agg_mode": "rollout_mean"}
        losses = {name: functools.partial(loss, **further) for name, loss in LOSSES.items()}
    trainer = Trainer(model=models[0], rl_losses=losses, max_steps=4, references={"initial": models.pop}, **options)
    if checkpoint is not None:
        load_state(checkpoint, trainer, rank=rank)
    return trainer


def give_adapters(model: Qwen3ForCausalLM, lora: dict) -> None:
    """Adapters that are not nothing."""
    add_adapters(model, lora, "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)


def train(trainer: Trainer, steps: tuple[int, ...], rank: int = 0, ranks: int = 1, most: int | None = None) -> list:
    """The metrics of each step; `most` as of `make_rows`."""
    batches = [StepBatch(step, share_of(make_rows(step, most), rank, ranks), 0) for step in steps]
    updates = trainer.config.updates_per_batch
    if updates > 1:
        batches = [StepBatch(step, pack(make_samples(step), 60, ranks, updates)[0][rank], 0) for step in steps]
    return [trainer.train_step(batch) for batch in batches]


def held(trainer: Trainer) -> int:
    """Bytes of this rank's weights, gradients and optimiser state."""
    states = [value for of_one in trainer.optimizer.state.values() for value in of_one.values()]
    parameters = list(trainer.model.parameters())
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None), *states]
    return sum(each.to_local().nbytes if hasattr(each, "to_local") else each.nbytes for each in tensors)


def options_of(name: str) -> tuple[dict, int | None]:
    """Of a case, what `make_trainer` takes and the most rows of a step."""
    options = dict(CASES[name])
    return options, options.pop("rows", None)


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting_{ranks}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    lines = {name: run(folder, name, rank, ranks) for name in RANKS[ranks]}
    before = folder / "checkpoint of 2"
    if ranks == 4:
        trainer = make_trainer(rank=rank, checkpoint=part_path(before, STEPS[-1]))
        lines["gone on"] = {"metrics": train(trainer, (NEXT,), rank, ranks)}
    (folder / f"lines_{ranks}_{rank}.json").write_text(json.dumps(lines))
    dist.destroy_process_group()


def run(folder: Path, name: str, rank: int, ranks: int) -> dict:
    """Run a case, and write what it ends with."""
    options, most = options_of(name)
    trainer = make_trainer(rank=rank, **options)
    metrics = train(trainer, STEPS, rank, ranks, most)
    save_weights(trainer.model, None if rank else folder / f"{name} {ranks}", torch.float64)
    if name in ("untied", "adapters"):
        run_dir = folder / f"checkpoint of {ranks}{' with adapters' * (name == 'adapters')}"
        part = take_part(trainer, rank=rank)
        if not rank:
            write_part(run_dir, STEPS[-1], part, trainer.model, {})
    return {"metrics": metrics, "bytes": held(trainer)}
