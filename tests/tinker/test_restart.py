"""A server that is killed at any moment and started again: no gradient is lost, none is there twice.

PRL_TINKER_KILLS=200 scripts/test tests/tinker/test_restart.py -k kills    takes three minutes
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import tinker_server
import torch
from safetensors.torch import load_file
from tinker_server import Client, Model, running, text

from prl.base.errors import ConfigError
from prl.models import model_path
from prl.tinker.store import ModelStore, Store

DATA = [text(14, seed=place) for place in range(6)]
PASSES = [
    ("/forward_backward", {"forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}) for datum in DATA
]
STEPS = [("/optim_step", {"adam_params": {"learning_rate": 0.01}})]
LOOP = [*PASSES[:2], *STEPS, *PASSES[2:3], *STEPS, *PASSES[3:], *STEPS]
KILLS = int(os.environ.get("PRL_TINKER_KILLS", "8"))
ROUNDS = 3 + KILLS // 8


class Forks:
    """Servers that follow one another at one address, in a process that has done already what takes seconds."""

    def __init__(self, folder):
        command = [sys.executable, tinker_server.__file__, str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.start()

    def start(self):
        print(file=self.process.stdin, flush=True)
        self.child = int(self.process.stdout.readline())

    def kill(self):
        os.kill(self.child, signal.SIGKILL)
        self.start()

    def close(self):
        os.kill(self.child, signal.SIGKILL)
        self.process.communicate()


def insistent(call):
    """Call until the server answers, as the SDK does."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return call()
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def loop(model, before=lambda: None):
    """Send the requests of a loop, each once it is certain that the one before was accepted. Returns their results."""
    results = []
    for _ in range(ROUNDS):
        for route, body in LOOP:
            before()
            model.number += 1
            number = model.number
            answer = insistent(lambda route=route, body=body, number=number: model.send(route, number, **body))
            results.append(insistent(lambda answer=answer: model.client.result(answer)))
    return results


def weights(folder, model):
    """The newest state of a model on disk."""
    _, tensors, state = next(
        m for m in Store(folder, model_path("tiny")).models() if m.record.model_id == model.id
    ).load()
    return tensors, state.step


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path):
    with running(tmp_path / "undisturbed") as client:
        calm = client.model(seed=7)
        expected = loop(calm)
    draw = random.Random(0)
    doomed = set(draw.sample(range(ROUNDS * len(LOOP)), KILLS))
    """Requests beside which the server is killed."""
    kills = []
    with contextlib.closing(Forks(tmp_path / "killed")) as forks:
        client = Client(forks.url)
        made = insistent(lambda: client.model(seed=7))

        def kill_now_and_then():
            if made.number in doomed:
                for kill in kills:
                    kill.join()
                kills.append(threading.Timer(draw.random() * 0.1, forks.kill))
                kills[-1].start()

        results = loop(made, kill_now_and_then)
        for kill in kills:
            kill.join()
        sampler = insistent(made.snapshot)
        made.do("/save_weights", path="end")
        forks.kill()
        sampled = insistent(lambda: made.sample(sampler, [30, 31]))
    assert len(kills) == KILLS and results == expected
    with running(tmp_path / "killed") as client:
        again = Model(client, made.id, made.session, made.number)
        assert again.sample(sampler, [30, 31])["sequences"] == sampled["sequences"]
    (killed, steps), (undisturbed, others) = weights(tmp_path / "killed", made), weights(tmp_path / "undisturbed", calm)
    assert steps == others == 3 * ROUNDS and killed.keys() == undisturbed.keys()
    assert all(torch.equal(killed[key], undisturbed[key]) for key in killed)


def test_a_server_goes_on_with_models_sessions_and_results(tmp_path):
    with running(tmp_path) as client:
        model = client.model(seed=2)
        model.train(DATA[:2])
        done = model.step(learning_rate=0.02)
        sampler, path = model.snapshot(), model.do("/save_weights", path="kept")["path"]
        pending = model.train(DATA[2:3])
        sampled = model.sample(sampler, [30, 31])
        logprobs = model.logprobs(DATA[:1])
    with running(tmp_path) as client:
        again = Model(client, model.id, model.session, model.number)
        assert client.result({"request_id": f"{model.id}:2"}) == done
        retried = {"data": DATA[2:3], "loss_fn": "cross_entropy"}
        assert client.result(again.send("/forward_backward", 5, forward_backward_input=retried)) == pending
        assert again.logprobs(DATA[:1]) == logprobs
        assert again.sample(sampler, [30, 31])["sequences"] == sampled["sequences"]
        assert again.step(learning_rate=0.02)["metrics"]["unclipped_grad_l2:mean"] > 0, "the gradient is there"
        assert again.do("/load_weights", path=path, optimizer=True)["type"] == "load_weights"


def test_a_half_written_folder_and_a_damaged_file(tmp_path):
    with running(tmp_path) as client:
        model = client.model(seed=2)
        model.train(DATA[:1])
        logprobs = model.logprobs(DATA[:1])
    folder = tmp_path / "models" / model.id.replace(":", "-")
    (folder / "state_000.writing").mkdir()
    (folder / "journal" / f".9.{os.getpid()}").write_bytes(b"half")
    with running(tmp_path) as client:
        assert Model(client, model.id, model.session, model.number).logprobs(DATA[:1]) == logprobs
    with pytest.raises(ConfigError, match="its models were trained beside .*tiny, not elsewhere: give another dir"):
        Store(tmp_path, "elsewhere")
    assert not (folder / "state_000.writing").exists()
    assert json.loads((tmp_path / "sessions.json").read_text())["sessions"]
    assert [*Path(folder).glob("state_*")] and load_file(next(folder.glob("state_*[0-9]")) / "tensors.safetensors")


def test_a_state_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with running(tmp_path) as client:
        with monkeypatch.context() as context:
            context.setattr(ModelStore, "save", full)
            model = client.model(seed=2)
            model.train(DATA[:1])
            assert model.step()["metrics"]["step:max"] == 1
        assert "cannot be written: [Errno 28] No space left" in caplog.text
