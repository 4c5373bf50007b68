"""Calls to a learner that one rank and several make alike, and what comes out."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from prl.base.files import write_tensors
from prl.models import model_path
from prl.tinker.learner import Learner
from prl.tinker.ranks import END, follow, join
from prl.tinker.wire import Adam, Datum, Forward, Lora, RequestError
from prl.trainer.lora import write_adapters

LENGTH = 128
LENGTHS = (30, 9, 17, 30, 12, 21)
PROMPT = 5
"""Tokens that all data begin with."""
CLIPPED = Adam(learning_rate=0.05, beta1=0.8, beta2=0.9, eps=2.0, weight_decay=0.1, grad_clip_norm=0.5)
"""With a large eps a step follows the size of the gradient, which Adam would hide."""
PLAIN = Adam(learning_rate=0.01, eps=2.0)


def data_of(loss: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 0, targets: int = 1) -> list[Datum]:
    """Replies to one prompt, with what a loss reads."""
    draw = torch.Generator().manual_seed(seed)
    data = []
    for length in lengths:
        tokens = [*range(40, 40 + PROMPT), *torch.randint(20, 90, (length - PROMPT,), generator=draw).tolist()]
        shape = (length,) if targets == 1 else (length, targets)
        inputs = {"target_tokens": torch.randint(20, 90, shape, generator=draw)}
        if loss == "cross_entropy":
            inputs["weights"] = torch.rand(shape, generator=draw)
        else:
            inputs["logprobs"] = -4.0 - torch.rand(shape, generator=draw)
            inputs["advantages"] = torch.randn(shape, generator=draw)
        data.append(Datum(tokens, {name: values.numpy() for name, values in inputs.items()}))
    return data


def config_of(ranks: int, **trainer: Any) -> dict[str, Any]:
    """What each rank is told."""
    trainer = {"device": "cpu", "num_processes": ranks, "tokens_per_forward": 64} | trainer
    model = {"path": model_path("tiny"), "trust_remote_code": False, "max_model_len": LENGTH}
    return {"model": model, "trainer": trainer}


def play(learner: Learner, folder: Path) -> None:
    """Make the calls; results go to `folder`."""
    results = {}

    def forward(name: str, data: list[Datum], loss: str, **how: Any) -> None:
        results[f"pass {len(results)}"] = learner.forward(name, Forward(name, None, data, loss, **how))

    def keep(name: str, file: str) -> None:
        write_tensors(learner.tensors(name), folder / f"{file}.safetensors")

    learner.add("one", Lora(rank=3, seed=1))
    learner.add("idle", Lora(rank=2))
    learner.forward("one", Forward("one", None, data_of("cross_entropy"), "cross_entropy"))
    learner.optim_step("one", Adam(learning_rate=0.02))
    learner.put("one", learner.tensors("one"), 1, False)  # its optimiser begins anew
    matrices, merged = learner.weights("one", True)
    adapter = learner.tenants["one"].adapter
    write_adapters(folder / "start", learner.model, matrices, adapter or "")
    write_tensors(merged, folder / "merged.safetensors")
    forward("one", data_of("cross_entropy", targets=3), "cross_entropy", forward_only=True)
    forward("one", data_of("ppo"), "ppo")
    forward("one", data_of("ppo", LENGTHS[:1], seed=2), "ppo")  # a rank has nothing then
    wrong = data_of("ppo")
    wrong[0].inputs["advantages"] = np.full(LENGTHS[0], 3e38, dtype=np.float32)
    for refused in (Forward("one", None, wrong, "importance_sampling"), Forward("one", None, wrong, "none")):
        try:
            learner.forward("one", refused)
        except RequestError as error:
            results[f"pass {len(results)}"] = str(error)
    keep("one", "gradient")
    results["step"] = learner.optim_step("one", CLIPPED)
    keep("one", "after")
    learner.remove("one")
    learner.remove("idle")
    learner.add("whole", None)
    forward("whole", data_of("cross_entropy", seed=5), "cross_entropy")
    forward("whole", data_of("cross_entropy", LENGTHS[:1], seed=4), "cross_entropy")
    results["whole step"] = learner.optim_step("whole", PLAIN)
    forward("whole", data_of("cross_entropy", seed=5), "cross_entropy")
    keep("whole", "whole")
    (folder / "results").write_bytes(msgspec.msgpack.encode(results))


def main(folder: Path, rank: int, ranks: int, **trainer: Any) -> None:
    """Be a rank."""
    torch.set_num_threads(1)
    learner, calls = join(config_of(ranks, **trainer), rank, str(folder / "meeting"))
    assert calls is not None
    if rank:
        return follow(learner, calls)
    play(learner, folder)
    calls.send(END)
    return None
