"""The trainer as a process: batches in as files, weights out as folders."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.base.checkpoint_folders import part_path, parts_of
from prl.base.errors import PrlError
from prl.config.schema import ModelConfig
from prl.launch.local import LocalLauncher, ProcessDied
from prl.launch.plan import TrainerSpec
from prl.losses import aipo_loss, default_loss
from prl.rollouts.messages import StepBatch
from prl.rollouts.packing import pack
from prl.tools.report.shares import read_spans
from prl.trainer import ranks, worker
from prl.trainer.sharding import timeout_of
from prl.trainer.trainer import Trainer
from prl.transport.files import FileTransport
from prl.weights.files import FileWeights


@pytest.fixture
def config(tiny_path):
    return {
        "model": {"path": tiny_path, "dtype": "float32", "trust_remote_code": False},
        "losses": {"": {"_target_": "prl.losses.default_loss", "_partial_": True, "kl_tau": 1e-3}},
        "weights": {"_target_": "prl.weights.files.FileWeights"},
        "seed": 0,
        "max_steps": 2,
        "references": [],
        "trainer": {"_target_": "prl.trainer.trainer.Trainer", "device": "cpu", "batch_timeout_s": 60.0},
    }


@pytest.fixture
def transport(tmp_path):
    return FileTransport(tmp_path)


def test_one_rank_on_a_gpu_shards_as_several_do(config, tmp_path, monkeypatch):
    """So that it runs in bfloat16 as they do; on a CPU a rank alone has the model to itself."""
    met = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(worker, "meet", lambda *of: met.append(of))
    monkeypatch.setattr(worker, "make_trainer", lambda *of, **options: 1 / 0)
    for device in ("cpu", "cuda"):
        config["trainer"]["device"] = device
        with pytest.raises(ZeroDivisionError):
            worker.run(config, tmp_path)
    assert met == [(0, 1, torch.device("cuda"), config["trainer"])]


def test_mendable_error_is_one_line(tmp_path):
    full = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
    assert worker.reason(full).startswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB.: take fewer tokens at once, "
    )
    with pytest.raises(FileNotFoundError) as missing:  # as of a file that a user's loss reads
        os.stat(tmp_path / "baseline.json")
    assert worker.reason(missing.value).startswith("FileNotFoundError: ")
    assert f"({__file__}, line " in worker.reason(missing.value)
    assert worker.reason(KeyError("a fault of prl's")) is None, "its traceback says more"


def test_collectives_wait_longer_than_any_other_deadline():
    assert ranks.collective_timeout({}) == timedelta(seconds=3660)
    for name in ranks.DEADLINES:
        given = dict.fromkeys(ranks.DEADLINES, 2.0) | {name: 5.0}
        ranks.meet(0, 1, torch.device("cpu"), given)
        try:
            assert timeout_of(dist.group.WORLD, torch.device("cpu")) == timedelta(seconds=65)
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("asked", [True, False])
def test_the_reference_is_loaded_where_it_is_asked_for(config, tiny, asked):
    lora = {"rank": 4, "alpha": 8.0, "target_modules": None}
    config["references"], config["model"]["lora"] = ["initial"] * asked, lora
    references = worker.make_trainer(config, torch.device("cpu")).references
    assert list(references) == ["initial"] * asked
    for reference in references.values():
        assert all(map(torch.equal, reference.parameters(), tiny.parameters()))
        assert not any(parameter.requires_grad for parameter in reference.parameters())


def batches(make_sample):
    for step in (1, 2):
        losses = ["", "math", "", "math", ""]
        samples = [make_sample(20, 4, seed=8 * step + i, loss=loss) for i, loss in enumerate(losses)]
        rows, truncated = pack(samples, 64, 1)
        yield StepBatch(step, rows[0], truncated)


MINE = """
from prl.losses import default_loss
def loss(*given, **options):
    return default_loss(*given, **options)
"""
SGD = {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9}


@pytest.mark.slow
def test_two_steps_of_a_process(config, make_sample, tiny, tiny_path, transport, tmp_path):
    """With a loss of the user's, another for one env, another optimiser: the weights of the same steps taken here."""
    for batch in batches(make_sample):
        transport.send_batch(batch, 0)
    (tmp_path / "mine.py").write_text(MINE)
    config["losses"][""]["_target_"] = "mine.loss"
    config["losses"]["math"] = {"_target_": "prl.losses.aipo_loss", "_partial_": True, "delta": 2.0}
    config["trainer"]["optim"] = SGD
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "prl.trainer", str(tmp_path)]
    done = subprocess.run(
        command, input=json.dumps(config), env=os.environ | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr

    assert transport.receive_metrics(0) == {}
    assert not (transport.weights_path(0) / "model.safetensors").exists()  # the base model is where it was
    metrics = [transport.receive_metrics(version) for version in (1, 2)]
    for line in metrics:
        assert {"mismatch_kl/all/mean", "is_masked", "is_clipped", "time/wait_for_batch", "time/train"} <= line.keys()
        assert line["tokens/trained"] == 5 * 16
    assert "idle/trainer" not in metrics[0], "its wait is that for the start"
    assert 0.0 <= metrics[1]["idle/trainer"] < 0.9
    problems = []
    spans = read_spans(tmp_path, problems)
    step = ["waiting for a batch", "forward and backward", "optimiser", "exporting weights"]
    assert [(span.what, span.step) for span in spans] == [
        ("loading the model", 0),
        *((what, number) for number in (1, 2) for what in step),
        ("checkpoint", 2),
    ]
    assert not problems and {span.process for span in spans} == {"trainer"}
    assert all(before.stop <= after.start for before, after in pairwise(spans))

    losses = {"": functools.partial(default_loss, kl_tau=1e-3), "math": functools.partial(aipo_loss, delta=2.0)}
    trainer = Trainer(model=tiny, rl_losses=losses, max_steps=2, device="cpu", optim=SGD)
    for version, batch in enumerate(batches(make_sample), 1):
        expected = trainer.train_step(batch)
        assert metrics[version - 1]["loss/mean"] == pytest.approx(expected["loss/mean"], rel=1e-4)
        announced = load_file(transport.weights_path(version) / "model.safetensors")
        for name, parameter in tiny.named_parameters():
            assert (announced[name] - parameter).abs().max() < 1e-5, name

    assert parts_of(tmp_path) == [2]
    checkpoint = part_path(tmp_path, 2)
    again = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert again.dtype == torch.float32
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, announced[name]), name
    # Without its generation config a model may not know every token that ends a turn.
    assert again.generation_config.eos_token_id == tiny.generation_config.eos_token_id is not None
    text = "12 + 7 = 19"
    assert AutoTokenizer.from_pretrained(checkpoint)(text) == AutoTokenizer.from_pretrained(tiny_path)(text)


def test_wait_for_batch_knows_when_none_follows(transport):
    transport.send_end(2)
    assert worker.wait_for_batch(transport, 3, 0, timeout_s=60, weights=FileWeights()) is None
    with pytest.raises(PrlError, match=r"no batch for step 2 within 0\.1 s"):
        worker.wait_for_batch(transport, 2, 0, timeout_s=0.1, weights=FileWeights())
    transport.send_batch(StepBatch(2, [], 0), 0)
    assert worker.wait_for_batch(transport, 2, 0, timeout_s=60, weights=FileWeights()).step == 2, (
        "the last one is still trained"
    )


@pytest.mark.parametrize(("last", "every", "checkpoints"), [(2, 1, [1, 2]), (0, None, [0])])
def test_an_early_end_leaves_a_checkpoint_of_its_step(
    config, make_sample, tiny, transport, tmp_path, last, every, checkpoints
):
    config["max_steps"] = 9
    config["losses"]["math"] = config["losses"][""]
    for batch in list(batches(make_sample))[:last]:
        batch.checkpoint = every is not None
        transport.send_batch(batch, 0)
    transport.send_end(last)
    worker.run(config, tmp_path)
    assert parts_of(tmp_path) == checkpoints
    assert transport.receive_metrics(last) is not None and transport.receive_metrics(last + 1) is None
    if not last:
        saved = load_file(part_path(tmp_path, 0) / "model.safetensors")
        assert all(torch.equal(saved[name], parameter) for name, parameter in tiny.named_parameters())


def test_a_batch_that_does_not_come_leaves_a_checkpoint(config, make_sample, transport, tmp_path):
    config["losses"]["math"] = config["losses"][""]
    config["trainer"]["batch_timeout_s"] = 0.1
    transport.send_batch(next(batches(make_sample)), 0)
    with pytest.raises(PrlError, match=r"no batch for step 2 within 0\.1 s"):
        worker.run(config, tmp_path)
    assert parts_of(tmp_path) == [1]


@pytest.fixture
def two_ranks(config, transport, tmp_path):
    """A launcher with two ranks that have loaded the model."""
    model = ModelConfig(**config["model"])
    with LocalLauncher() as launcher:
        launcher.start_trainer(TrainerSpec(run_dir=tmp_path, model=model, payload=config, num_processes=2))
        deadline = time.monotonic() + 60
        while transport.receive_metrics(0) is None:
            launcher.ensure_alive()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield launcher


@pytest.mark.slow
def test_ranks_listen_locally_and_a_dead_one_is_named(two_ranks, sockets, tmp_path):
    tcp = [sockets(process.pid)[0] for process in two_ranks.processes]
    meeting = two_ranks.scratch / "ranks"
    assert [[host for host, _ in found] for found in tcp] == [["127.0.0.1"]] * 2, "gloo's, one for each rank"
    assert [process.log.name for process in two_ranks.processes] == ["trainer.log", "trainer_rank_1.log"]
    (rank,) = children(two_ranks.processes[1].pid)
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessDied, match="process 'trainer rank 1' ended"):
        while time.monotonic() < deadline:
            two_ranks.ensure_alive()
            time.sleep(0.01)
    two_ranks.stop()
    assert not meeting.exists()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
