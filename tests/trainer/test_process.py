"""The trainer as a process: batches in as files, weights out as folders."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.config.schema import ModelConfig
from prl.errors import PrlError
from prl.launch.launcher import TrainerSpec
from prl.launch.local import LocalLauncher, ProcessDied
from prl.orchestrator.packing import pack
from prl.report.shares import read_spans
from prl.trainer import ranks, worker
from prl.trainer.config import MEETING_VARIABLE
from prl.trainer.loss import aipo_loss, default_loss
from prl.trainer.trainer import Trainer
from prl.wire.checkpoints import part_path, parts_of
from prl.wire.files import FileTransport, write_atomically
from prl.wire.messages import StepBatch
from prl.wire.process_group import deadline_of


@pytest.fixture
def config(tiny_path):
    return {
        "model": {"path": tiny_path, "dtype": "float32", "trust_remote_code": False},
        "losses": {"": {"_target_": "prl.trainer.loss.default_loss", "_partial_": True, "kl_tau": 1e-3}},
        "transport": {"_target_": "prl.wire.files.FileTransport"},
        "seed": 0,
        "max_steps": 2,
        "initial_reference": False,
        "trainer": {"_target_": "prl.trainer.trainer.Trainer", "device": "cpu", "batch_timeout_s": 60.0},
    }


@pytest.fixture
def transport(tmp_path):
    return FileTransport(tmp_path)


@pytest.fixture
def start(config, tmp_path):
    """`start()` runs the trainer on `tmp_path`; it is ended with the test."""
    with contextlib.ExitStack() as stack:

        def run(*launcher, **env):
            process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "prl.trainer", str(tmp_path)],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PRL_CONFIG": json.dumps(config)}
                | env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield run


@pytest.fixture
def refused(config, tmp_path, monkeypatch, capsys):
    """`refused()`: what the trainer, run in this process, says when it ends with status 1."""

    def run():
        monkeypatch.setenv("PRL_CONFIG", json.dumps(config))
        monkeypatch.setattr(sys, "argv", ["prl.trainer", str(tmp_path)])
        with pytest.raises(SystemExit) as end:
            worker.main()
        assert end.value.code == 1
        return capsys.readouterr().err

    return run


def test_on_a_gpu_one_rank_shares_the_model_as_several_do(config, tmp_path, monkeypatch):
    """So that it runs in bfloat16 as they do; on a CPU a rank alone has the model to itself."""
    met, made = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(worker, "meet", lambda *of: met.append(of))
    monkeypatch.setattr(worker, "make_trainer", lambda config, device, **others: made.append(device) or 1 / 0)
    for device in ("cpu", "cuda"):
        config["trainer"]["device"] = device
        with pytest.raises(ZeroDivisionError):
            worker.run(config, tmp_path)
    assert met == [(0, 1, torch.device("cuda"), config["trainer"])] and made == [
        torch.device("cpu"),
        torch.device("cuda"),
    ]


def test_a_gpu_that_is_full_is_said_with_the_option(refused, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    monkeypatch.setattr(worker, "make_trainer", full)
    said = refused()
    assert said.startswith(
        "trainer: CUDA out of memory. Tried to allocate 2.00 GiB.: take fewer tokens at once, trainer."
    )
    assert said.count("\n") == 1


def test_a_rank_that_does_not_meet_the_others_says_so_at_the_deadline(start, config, tmp_path):
    """torch, which it is in then, would wait for half an hour."""
    config["trainer"]["ready_timeout_s"] = 1.5
    alone = start(RANK="0", WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo", **{MEETING_VARIABLE: str(tmp_path / "ranks")})
    said = alone.communicate(timeout=120)[1]
    assert "trainer: rank 0 had not met all 2 ranks after 1.5 s (trainer.ready_timeout_s): do all run" in said
    assert alone.returncode == 1 and "Traceback" not in said


def test_a_rank_waits_for_another_longer_than_any_does_by_itself():
    assert ranks.patience_s({}) == 3660
    for knob in ranks.DEADLINES:
        given = dict.fromkeys(ranks.DEADLINES, 2.0) | {knob: 5.0}
        assert ranks.patience_s(given) == 65
        ranks.meet(0, 1, torch.device("cpu"), given)
        try:
            assert deadline_of(dist.group.WORLD, torch.device("cpu")) == timedelta(seconds=65)
        finally:
            dist.destroy_process_group()


SILENT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from prl.trainer import ranks, worker

def run(config, run_dir):
    (run_dir / f"imported-{rank}").touch()
    while not (run_dir / f"imported-{1 - rank}").exists():
        time.sleep(0.01)
    ranks.meet(rank, 2, torch.device("cpu"), config["trainer"])
    time.sleep(600 * rank)
    dist.all_reduce(torch.ones(3))

rank, ranks.BEHIND_S, worker.run = int(os.environ["RANK"]), 0.25, run
worker.main()
"""


def test_a_rank_whose_neighbour_is_silent_names_the_deadlines(config, tmp_path):
    config["trainer"] |= {"batch_timeout_s": 2.0, "finish_timeout_s": 2.25, "ready_timeout_s": 2.0}
    env = os.environ | {"PRL_CONFIG": json.dumps(config), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {MEETING_VARIABLE: str(tmp_path / "ranks")}
    command = [sys.executable, "-c", SILENT, str(tmp_path)]
    with subprocess.Popen(command, env=env | {"RANK": "1"}) as other:
        try:
            waiting = subprocess.run(command, env=env | {"RANK": "0"}, capture_output=True, text=True, timeout=120)
        finally:
            other.kill()
    said = "trainer: another rank did not come to where this one waited within 2.5 s (0.25 s more than the longest of "
    assert said + "trainer.ready_timeout_s, trainer.batch_timeout_s, trainer.finish_timeout_s)" in waiting.stderr
    assert waiting.returncode == 1 and "Traceback" not in waiting.stderr


def batches(make_sample):
    for step in (1, 2):
        rows, truncated = pack([make_sample(20, 4, seed=8 * step + i) for i in range(5)], 64, 1)
        yield StepBatch(step, rows[0], truncated)


MINE = """
from prl.trainer.loss import default_loss
def loss(*given, **knobs):
    return default_loss(*given, **knobs)
"""


@pytest.mark.slow
def test_two_steps(start, config, make_sample, tiny, tiny_path, transport, tmp_path):
    for batch in batches(make_sample):
        transport.send_batch(batch, 0)
    (tmp_path / "mine.py").write_text(MINE)
    config["losses"][""]["_target_"] = "mine.loss"
    process = start(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    looks, seen = 0, set()
    while process.poll() is None:
        looks += 1
        for version in (0, 1, 2):  # a reader must never see half a folder
            folder = transport.weights_path(version)
            if version in seen or not folder.exists():
                continue
            seen.add(version)
            assert (folder / "metrics.json").exists()
            json.loads((folder / "metrics.json").read_text())
            if version:
                load_file(folder / "model.safetensors")
                assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
        for folder in tmp_path.glob("checkpoints/.step_??????"):
            assert (folder / "tokenizer.json").exists() and (folder / "model.safetensors").exists()
        time.sleep(0.0005)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert looks > 50 and seen == {0, 1, 2}

    assert transport.receive_metrics(0) == {}
    assert not (transport.weights_path(0) / "model.safetensors").exists()  # the base model is where it was
    metrics = [transport.receive_metrics(version) for version in (1, 2)]
    for line in metrics:
        assert {
            "loss/mean",
            "mismatch_kl/all/mean",
            "logprob_gap/mean",
            "time/wait_for_batch",
            "time/train",
        } <= line.keys()
        assert line["tokens/trained"] == 5 * 16

    assert "idle/trainer" not in metrics[0], "its wait is that for the start"
    assert 0.0 <= metrics[1]["idle/trainer"] < 0.9
    problems = []
    spans = read_spans(tmp_path, problems, steps=2)
    step = ["waiting for a batch", "forward and backward", "optimiser", "exporting weights"]
    assert [(span.what, span.step) for span in spans] == [
        ("loading the model", 0),
        *((what, number) for number in (1, 2) for what in step),
        ("checkpoint", 2),
    ]
    assert not problems and {span.process for span in spans} == {"trainer"}
    assert all(before.stop <= after.start for before, after in pairwise(spans))

    # The announced weights are those of the same two steps taken here.
    losses = {"": functools.partial(default_loss, kl_tau=1e-3)}
    trainer = Trainer(model=tiny, rl_losses=losses, max_steps=2, device="cpu")
    for version, batch in enumerate(batches(make_sample), 1):
        expected = trainer.train_step(batch)
        assert metrics[version - 1]["loss/mean"] == pytest.approx(expected["loss/mean"], rel=1e-4)
        announced = load_file(transport.weights_path(version) / "model.safetensors")
        for name, parameter in tiny.named_parameters():
            assert (announced[name] - parameter).abs().max() < 1e-5, name  # the steps move weights by 5e-4

    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == [".step_000002"]
    checkpoint = part_path(tmp_path, 2)
    again = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert again.dtype == torch.float32
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, announced[name]), name
    # Without its generation config a model may not know every token that ends a turn.
    assert (checkpoint / "generation_config.json").exists()
    assert again.generation_config.eos_token_id == tiny.generation_config.eos_token_id is not None
    text = "12 + 7 = 19"
    assert AutoTokenizer.from_pretrained(checkpoint)(text) == AutoTokenizer.from_pretrained(tiny_path)(text)
    assert not [name for name in os.listdir(tmp_path / "weights") if name.startswith(".")]  # nothing half done


@pytest.mark.slow
def test_batch_timeout(start, config, make_sample, transport, tmp_path):
    config["trainer"]["batch_timeout_s"] = 0.5
    transport.send_batch(next(batches(make_sample)), 0)
    process = start()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip().endswith("trainer: the orchestrator shipped no batch for step 2 within 0.5 s")
    assert "Traceback" not in errors
    assert transport.receive_metrics(1)  # the step before it was announced


def test_wait_for_batch_names_a_file_that_is_no_batch(transport):
    path = transport.batch_path(3, 1)
    write_atomically(path, b"\x93\x01\x02\x03")
    with pytest.raises(PrlError, match=f"{path} does not hold a batch: Expected"):
        worker.wait_for_batch(transport, 3, 1, timeout_s=5)


def test_wait_for_batch_knows_when_none_follows(transport):
    transport.send_end(2)
    assert worker.wait_for_batch(transport, 3, 0, timeout_s=60) is None
    with pytest.raises(PrlError, match=r"no batch for step 2 within 0\.1 s"):
        worker.wait_for_batch(transport, 2, 0, timeout_s=0.1)
    transport.send_batch(StepBatch(2, [], 0), 0)
    assert worker.wait_for_batch(transport, 2, 0, timeout_s=60).step == 2, "the last one is still trained"


@pytest.mark.slow
@pytest.mark.parametrize(("last", "every", "checkpoints"), [(2, None, [2]), (2, 1, [1, 2]), (0, 1, [0])])
def test_an_early_end(config, make_sample, tiny, transport, tmp_path, last, every, checkpoints):
    """It trains what came, writes the checkpoint of the step that turns out to be the last, and is content."""
    config["max_steps"] = 9
    for batch in list(batches(make_sample))[:last]:
        batch.checkpoint = every is not None
        transport.send_batch(batch, 0)
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(worker.run, config, tmp_path)
        deadline = time.monotonic() + 60
        while transport.receive_metrics(last) is None:
            assert not trainer.done() and time.monotonic() < deadline, trainer.result(0)
            time.sleep(0.02)
        transport.send_end(last)
        trainer.result(timeout=60)
    assert parts_of(tmp_path) == checkpoints
    assert transport.receive_metrics(last + 1) is None
    if not last:
        saved = load_file(part_path(tmp_path, 0) / "model.safetensors")
        assert all(torch.equal(saved[name], parameter) for name, parameter in tiny.named_parameters())


@pytest.mark.slow
def test_corrupt_batch(refused, make_sample, transport):
    transport.send_batch(next(batches(make_sample)), 0)
    path = transport.batch_path(1, 0)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    last = refused().strip().splitlines()[-1]
    assert last.startswith(f"trainer: {path} does not hold a batch: ")
    assert transport.receive_metrics(1) is None


@pytest.mark.slow
def test_two_losses_and_another_optimiser(config, make_sample, tiny, transport, tmp_path):
    config["losses"]["math"] = {"_target_": "prl.trainer.loss.aipo_loss", "_partial_": True, "delta": 2.0}
    config["trainer"] |= {"optim": {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9}}
    config["max_steps"] = 1
    rows, _ = pack([make_sample(20, 4, seed=i, loss="math" if i % 2 else "") for i in range(4)], 64, 1)
    transport.send_batch(StepBatch(1, rows[0], 0), 0)
    worker.run(config, tmp_path)
    losses = {"": functools.partial(default_loss, kl_tau=1e-3), "math": functools.partial(aipo_loss, delta=2.0)}
    optim = {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9}
    trainer = Trainer(model=tiny, rl_losses=losses, max_steps=1, optim=optim)
    expected = trainer.train_step(StepBatch(1, rows[0], 0))
    found = transport.receive_metrics(1)
    assert {"is_masked", "is_clipped"} <= found.keys()
    assert found["loss/mean"] == pytest.approx(expected["loss/mean"], rel=1e-4)


@pytest.mark.slow
def test_an_unknown_loss_ends_the_process_with_its_name(refused, make_sample, transport):
    rows, _ = pack([make_sample(20, 4, loss="math")], 64, 1)
    transport.send_batch(StepBatch(1, rows[0], 0), 0)
    assert "trainer: env 'test': a sample names the rl loss 'math'" in refused()


def test_a_file_that_a_users_code_reads_is_named_with_the_line(monkeypatch, capsys, tmp_path):
    def run(*_):
        os.stat(tmp_path / "baseline.json")

    monkeypatch.setenv("PRL_CONFIG", "{}")
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path)])
    monkeypatch.setattr(worker, "run", run)
    with pytest.raises(SystemExit):
        worker.main()
    said = capsys.readouterr().err
    assert said.startswith("trainer: FileNotFoundError: ") and f"({__file__}, line " in said


COUNTING = """
import torch
from prl.trainer.trainer import Trainer

class Counting(Trainer):
    def train_step(self, batch):
        print("threads:", torch.get_num_threads(), flush=True)
        return super().train_step(batch)
"""


@pytest.mark.slow
def test_a_rank_computes_with_its_threads_and_comes_to_the_same_weights_each_time(
    config, make_sample, tmp_path, monkeypatch
):
    """Sums over tokens are long enough here to be divided among threads."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(tmp_path)]))
    config["trainer"]["_target_"] = "counting.Counting"
    rows, truncated = pack([make_sample(24, 6, seed=seed) for seed in range(64)], 512, 1)
    found = []
    for turn in ("first", "second"):
        folder = tmp_path / turn
        (folder / "logs").mkdir(parents=True)
        for step in (1, 2):
            FileTransport(folder).send_batch(StepBatch(step, rows[0], truncated), 0)
        spec = TrainerSpec(folder, ModelConfig(**config["model"]), config, num_processes=1, threads=2)
        with LocalLauncher() as launcher:
            launcher.start_trainer(spec)
            asyncio.run(launcher.finish(120))
        assert (folder / "logs" / "trainer.log").read_text().count("threads: 2") == 2
        found.append(load_file(FileTransport(folder).weights_path(2) / "model.safetensors"))
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


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
def test_ranks_listen_on_this_machine_alone_and_one_that_dies_is_named(two_ranks, sockets, tmp_path):
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
