"""The trainer process: waits for a batch, takes a step, announces the new weights.

Started by the launcher with the resolved config in `PRL_CONFIG` (JSON), one process per rank.
"""

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from prl.config.instantiate import knobs, locate_call, locate_class
from prl.errors import PrlError
from prl.reaper import die_with_parent
from prl.trainer.config import TrainerConfig
from prl.trainer.export import TokenExport
from prl.trainer.model import check_packing, load_model, save_weights
from prl.trainer.shared_prefix import check_sharing, shared_stacks
from prl.trainer.trainer import Trainer
from prl.wire import StepBatch, files

POLL_S = 0.002
ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def wait_for_batch(run_dir: Path, step: int, rank: int, timeout_s: float) -> StepBatch | None:
    """The batch of `step`, None if there will be none. PrlError names what did not come, or what cannot be read."""
    deadline = time.monotonic() + timeout_s
    try:
        while (batch := files.read_batch(run_dir, step, rank)) is None:
            if (last := files.read_end(run_dir)) is not None and last < step:
                return None
            if time.monotonic() > deadline:
                raise PrlError(f"the orchestrator shipped no batch for step {step} within {timeout_s:g} s")
            time.sleep(POLL_S)
    except msgspec.DecodeError as error:
        raise PrlError(f"{files.batch_path(run_dir, step, rank)} is not a batch: {error}") from error
    return batch


def run(config: dict, run_dir: Path) -> None:
    """The life of one rank: load, then one step after the other."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    trainer_config = msgspec.convert(knobs(config["trainer"]), TrainerConfig)
    device = torch.device(config["trainer"]["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1:
        if sys.platform == "linux":
            die_with_parent()  # torchrun puts ranks into sessions of their own, where the launcher cannot end them
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model_config = config["model"]
    torch.manual_seed(config["seed"])
    model = load_model(model_config["path"], device=device, trust_remote_code=model_config["trust_remote_code"])
    check_packing(model)
    if trainer_config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    rl_loss = locate_call(config["loss"], "loss")
    trainer_class = locate_class(config["trainer"]["_target_"], Trainer, "trainer")
    trainer = trainer_class(
        trainer_config, model, rl_loss, max_steps=config["max_steps"], autocast=device.type == "cuda"
    )
    if config.get("token_export"):
        trainer.export = TokenExport(run_dir, rank)
    if trainer.layout is shared_stacks:
        check_sharing(model)
    engine_dtype = ENGINE_DTYPES[model_config["dtype"]]
    publish(run_dir, 0, None, engine_dtype, {}, rank)

    trained = saved = 0
    for step in range(1, config["max_steps"] + 1):
        started = time.monotonic()
        batch = wait_for_batch(run_dir, step, rank, trainer_config.batch_timeout_s)
        if batch is None:
            break
        got = time.monotonic()
        metrics = trainer.train_step(batch)
        metrics |= {"time/wait_for_batch": got - started, "time/train": time.monotonic() - got}
        publish(run_dir, step, model, engine_dtype, metrics, rank)
        trained, every = step, trainer_config.checkpoint_every
        if rank == 0 and every and step % every == 0:
            write_checkpoint(run_dir, step, model, model_config)
            saved = step
    if rank == 0 and (saved < trained or not trained):
        write_checkpoint(run_dir, trained, model, model_config)
    if world_size > 1:
        dist.destroy_process_group()


def publish(
    run_dir: Path, version: int, model: torch.nn.Module | None, dtype: torch.dtype, metrics: dict, rank: int
) -> None:
    """Announce policy `version`: its weights (none for an unchanged base model) and the metrics of its step."""
    if rank != 0:
        return
    folder = run_dir / "weights" / f".{files.step_name(version)}"
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        save_weights(model, folder, dtype)
    (folder / "metrics.json").write_bytes(msgspec.json.encode(metrics))
    files.announce(folder, files.weights_path(run_dir, version))


def write_checkpoint(run_dir: Path, step: int, model: torch.nn.Module, model_config: dict) -> None:
    """A Hugging Face folder with the float32 weights of `step`, the tokenizer and the generation config."""
    final = files.checkpoint_path(run_dir, step)
    folder = final.with_name(f".{final.name}")
    save_weights(model, folder, torch.float32)
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string())  # end-of-turn tokens
    tokenizer = AutoTokenizer.from_pretrained(model_config["path"], trust_remote_code=model_config["trust_remote_code"])
    tokenizer.save_pretrained(folder)
    files.announce(folder, final)


def main() -> None:
    try:
        run(json.loads(os.environ["PRL_CONFIG"]), Path(sys.argv[1]))
    except (PrlError, ValueError) as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
