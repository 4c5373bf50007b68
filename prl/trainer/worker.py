"""The loop of one trainer rank: wait for a batch, take a step, publish the new weights."""

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import PreTrainedModel

from prl.base.errors import DeadlinePassed, PrlError, of_disk, of_own_code
from prl.base.text import as_message, in_one_line
from prl.config.build import build, maker
from prl.config.model_folder import companion_files, sees, tokenizer_files
from prl.config.trainer import TrainerConfig, precision_of
from prl.losses.options import loss_of
from prl.rollouts.messages import StepBatch
from prl.trainer import lora
from prl.trainer.checkpoint_part import load_state, take_part, write_part
from prl.trainer.export import TokenExport, example_steps
from prl.trainer.model import check_layout, freeze, load_model, token_text
from prl.trainer.policy import PolicyTensors
from prl.trainer.ranks import meet
from prl.trainer.sharding import reshard
from prl.trainer.trainer import Trainer
from prl.transport.events import BATCH, CHECKPOINT, EXPORTING, MODEL, TRAINER, Track
from prl.transport.files import FileTransport
from prl.weights.base import Weights

if TYPE_CHECKING:
    from prl.rollouts.inputs import Picture
    from prl.rollouts.pictures import Features

POLL_S = 0.005
PREFIX = "trainer: "
"""Beginning of the line, on stderr, with the reason why this process ends."""


def main(rank: Callable[[Mapping[str, Any], Path], None] | None = None) -> None:
    """Run one rank, by `run` or another function; an error meant for the user is printed without a traceback."""
    config = sys.stdin.readline()  # which comes once all is read that may be refused
    if not config:
        raise SystemExit
    try:
        (rank or run)(json.loads(config), Path(sys.argv[1]))
    except Exception as error:
        text = reason(error)
        if text is None:
            raise
        print(as_message(f"{PREFIX}{text}"), file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def reason(error: BaseException) -> str | None:
    """One line on an error that ends the trainer; None where its traceback is of more use."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{in_one_line(error)}: take fewer tokens at once, trainer.tokens_per_forward=…, or leave less to an "
            "engine on the same GPU, engine.gpu_memory_utilization=…; dry_run=true says what a run takes"
        )
    if isinstance(error, SafetensorError):  # one of reading is a ValueError by now
        return f"weights or a checkpoint cannot be written: {error}"
    if isinstance(error, PrlError | ValueError | OSError):
        # Of a user's loss or schedule; a library's own error, which has no number, says it all.
        own = isinstance(error, OSError) and error.errno is not None
        return of_disk(error) or (of_own_code(error) if own else str(error))
    return None


def run(config: Mapping[str, Any], run_dir: Path, stopping: threading.Event | None = None) -> None:
    """Load the model, then train step after step until the last one.

    Args:
        config: the resolved nodes `model`, `losses` (rl loss nodes by name, "" is the run's), `trainer` and `weights`,
            and the values `seed`, `max_steps`, `references` (names of the models in the trainer that samples name as
            theirs); where the run goes on, `resume` (`folder` and `step` of a checkpoint); `engine_workers` if weights
            go there from process to process.
        run_dir: the run directory.
        stopping: ends it where it waits, without a checkpoint; None = a process is stopped by signals.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(config["trainer"]["device"])
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world_size > 1 or device.type == "cuda" or config["trainer"].get("cpu_offload"):
        meet(rank, world_size, device, config["trainer"])
    resume = config.get("resume")
    trained = 0 if resume is None else resume["step"]
    track = Track(TRAINER if rank == 0 else f"{TRAINER} rank {rank}", run_dir)
    with contextlib.closing(track), contextlib.ExitStack() as opened:
        with track.doing(MODEL, trained):
            transport = FileTransport(run_dir)
            # Each rank makes its own: publishing a version is a collective.
            weights = build(config["weights"], Weights, "weights")
            weights.attach(transport, rank=rank, workers=config.get("engine_workers", 1))
            export = make_export(config, run_dir, rank)
            trainer = make_trainer(config, device, track=track, export=export, run_dir=run_dir)
            saved = None if resume is None else trained
            files = Files(run_dir, trainer, config["model"], rank, saved)
            opened.callback(files.writer.shutdown)
            if resume is not None:
                load_state(Path(resume["folder"]), trainer, rank=rank)
            dtype = getattr(torch, config["model"]["dtype"])
            policy = PolicyTensors(trainer.model, dtype, adapters_alone=config.get("adapters_alone", False))
            publish = Publish(transport, weights, policy, rank)
            publish(trained, {}, changed=resume is not None)
        train(trainer, publish, files, rank=rank, trained=trained, max_steps=config["max_steps"], stopping=stopping)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    trainer: Trainer,
    publish: "Publish",
    files: "Files",
    *,
    rank: int,
    trained: int,
    max_steps: int,
    stopping: threading.Event | None = None,
) -> None:
    """Train from the step after `trained` to the last, or to the one that the run ends with."""
    track = trainer.track
    weights = publish.weights
    updated_at: float | None = None
    for step in range(trained + 1, max_steps + 1):
        files.check()
        try:
            with track.doing(BATCH, step) as waiting:
                batch = wait_for_batch(
                    publish.transport, step, rank, trainer.config.batch_timeout_s, stopping, weights=weights
                )
        except DeadlinePassed:
            files.try_to_write_last(trained)
            raise
        if batch is None:  # the run ends before `max_steps`
            break
        try:
            metrics = trainer.train_step(batch)
        except PrlError:
            # A gradient that is not finite leaves the weights of the step before, which are worth a checkpoint.
            if not trainer.between_updates:
                files.try_to_write_last(trained)
            raise
        now = time.monotonic()
        metrics |= {"time/wait_for_batch": waiting.seconds, "time/train": now - waiting.stopped}
        if updated_at is not None:  # the first batch waits for the engine's start, which says nothing of the balance
            metrics["idle/trainer"] = waiting.seconds / (now - updated_at)
        trained = step
        updated_at = now
        # Weights before the checkpoint: the engines wait for them, nobody waits for the checkpoint.
        with track.doing(EXPORTING, step):
            publish(step, metrics)
            weights.hold(step)
        if batch.checkpoint:
            files.write_checkpoint(step)
    weights.serve_to_the_end(trained)
    # However the run ends, it can go on from its last step.
    files.write_checkpoint(trained, last=True)


@dataclass(frozen=True)
class Publish:
    """Publishes policy versions, of which each rank has a part."""

    transport: FileTransport
    weights: Weights
    policy: PolicyTensors
    rank: int

    def __call__(self, version: int, metrics: dict[str, float], *, changed: bool = True) -> None:
        """Publish a version with the metrics of its step. A collective, unless it is the base model (not `changed`)."""
        if self.rank == 0:
            write = functools.partial(self.weights.publish, version, self.policy) if changed else None
            self.transport.publish(version, metrics, write)
        elif changed:
            self.weights.publish(version, self.policy, None)


class Files:
    """Writes this rank's share of checkpoints.

    Args:
        run_dir: the run directory.
        trainer: whose state is written.
        model: the node `model`.
        rank: this process's.
        saved: the step of the newest checkpoint; None = there is none.
    """

    def __init__(self, run_dir: Path, trainer: Trainer, model: Mapping[str, Any], rank: int, saved: int | None):
        self.run_dir = run_dir
        self.trainer = trainer
        self.rank = rank
        self.saved = saved
        self.writer = ThreadPoolExecutor(1, "prl-checkpoint")
        self.writing: Future[None] | None = None
        """Write of a checkpoint that was begun last."""
        # Read now: the model's folder may be gone when a checkpoint is written.
        path, code = model["path"], model["trust_remote_code"]
        self.companions = companion_files(path) if rank == 0 else {}
        self.tokenizer = tokenizer_files(path, trust_remote_code=code) if rank == 0 else {}

    def write_checkpoint(self, step: int, *, last: bool = False) -> None:
        """Copy the trainer's part of the checkpoint of `step`, unless it has one, and begin to write it.

        Waits until the one before is written, so that there is one copy at a time; if it is the `last`, for itself too.
        Raises what keeps either from being written.
        """
        with self.trainer.track.doing(CHECKPOINT, step):
            self.wait()
            if self.saved != step:
                part = take_part(self.trainer, rank=self.rank)
                if self.rank == 0:
                    files = self.companions | self.tokenizer
                    self.writing = self.writer.submit(write_part, self.run_dir, step, part, self.trainer.model, files)
                self.saved = step
            if last:
                self.wait()

    def try_to_write_last(self, step: int) -> None:
        """Write a checkpoint where the trainer fails after `step`; that comes first: what fails here is printed."""
        if not step:
            return
        try:
            self.write_checkpoint(step, last=True)
        except Exception as error:
            print(as_message(f"no last checkpoint: {reason(error) or error}"), file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raise the error of the last write of a checkpoint, if it has ended with one."""
        if self.writing is not None and self.writing.done():
            self.writing.result()

    def wait(self) -> None:
        """Wait until the last checkpoint that was begun is written. Raises the error of that write."""
        if self.writing is not None:
            self.writing.result()


def make_export(config: Mapping[str, Any], run_dir: Path, rank: int) -> TokenExport | None:
    """Return what writes the tokens of all steps (`token_export`) or of some (`example_steps`); None = of none."""
    every = config["trainer"].get("token_export", TrainerConfig.token_export)
    some = example_steps(config["trainer"].get("example_steps", TrainerConfig.example_steps), config["max_steps"])
    if not (every or some):
        return None
    return TokenExport(run_dir, rank, None if every else some, token_text(config["model"]))


def make_trainer(
    config: Mapping[str, Any],
    device: torch.device,
    *,
    track: Track | None = None,
    export: TokenExport | None = None,
    run_dir: Path | None = None,
) -> Trainer:
    """Load the policy, or its checkpoint, and build its trainer, with the references that samples will name.

    Each begins as the model at `model.path`, in the policy's number format: one more copy of the weights in memory.
    Raises for a model that packing or shared tokens would get wrong. Of several ranks the first loads for all. A model
    that sees finds the pictures of samples in `run_dir`.
    """
    torch.manual_seed(config["seed"])
    precision = precision_of(config["trainer"].get("dtype", TrainerConfig.dtype), device.type)
    if precision.is_mixed and not dist.is_initialized():
        meet(0, 1, device, config["trainer"])  # bfloat16 over float32 weights is for ranks
    place = torch.device("meta" if dist.get_rank() else "cpu") if dist.is_initialized() else device
    longest = config["model"].get("max_model_len")
    code = config["model"]["trust_remote_code"]
    load = functools.partial(
        load_model, device=place, trust_remote_code=code, ends=config.get("ends"), max_model_len=longest
    )
    policy = load_policy(config, load)
    losses = {name: loss_of(node, f"envs.{name}.loss" if name else "loss") for name, node in config["losses"].items()}

    def load_reference(name: str) -> PreTrainedModel:
        model = load(config["model"]["path"])
        if lora.has_adapters(policy) and ":" in name:  # it follows the policy's parameters one by one
            lora.add_adapters(model, config["model"]["lora"], config["model"]["path"])
        return model

    # The trainer itself builds these two components, the optimisers with the model's parameters: they stay nodes.
    nodes = {name: config["trainer"].get(name) for name in ("optim", "schedule")}
    fields = {name: value for name, value in config["trainer"].items() if name not in nodes}
    trainer = maker(fields, Trainer, "trainer")(
        model=policy,
        rl_losses=losses,
        max_steps=config["max_steps"],
        precision=precision,
        references={name: functools.partial(load_reference, name) for name in config["references"]},
        features=features_of(policy, run_dir),
        export=export,
        track=track,
        **nodes,
    )
    check_layout(policy, trainer.layout, device, precision.tolerance, longest)
    reshard(policy)
    return trainer


def load_policy(config: Mapping[str, Any], load: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Load the policy, or its checkpoint, with the adapters or frozen parts that the config has."""
    path, resume = config["model"]["path"], config.get("resume")
    adapters = config["model"].get("lora") or {}
    adapted = adapters.get("rank") is not None  # beside the weights that the run began with
    model = load(path if resume is None or adapted else resume["folder"])
    if adapted:
        lora.add_adapters(model, adapters, path)
        if resume is not None and model.device.type != "meta":
            lora.load_adapters(model, Path(resume["folder"]))
    freeze(model, config["model"].get("freeze") or [])
    return model


def features_of(model: PreTrainedModel, run_dir: Path | None) -> "Callable[[Picture], Features] | None":
    """Return the function that reads features of a run's pictures; None where the model sees none."""
    if run_dir is None or not sees(model.config):
        return None
    from prl.rollouts.pictures import FOLDER, PictureStore  # a run with text needs none

    return PictureStore(run_dir / FOLDER).features


def wait_for_batch(
    transport: FileTransport,
    step: int,
    rank: int,
    timeout_s: float,
    stopping: threading.Event | None = None,
    *,
    weights: Weights,
) -> StepBatch | None:
    """The batch of `step`, or None if the run ends before it. Raises DeadlinePassed when none arrives in time.

    Meanwhile the weights of the step before go to engines that are started again.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        batch = transport.receive_batch(step, rank)
        weights.serve(step - 1)  # also with the batch in hand: what was asked for before it is served on every rank
        if batch is not None:
            return batch
        last = transport.receive_end()
        if last is not None and last < step:
            return None
        if stopping is not None and stopping.is_set():
            raise SystemExit
        if time.monotonic() > deadline:
            raise DeadlinePassed(f"the orchestrator shipped no batch for step {step} within {timeout_s:g} s")
        time.sleep(POLL_S)
