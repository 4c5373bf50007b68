"""A server of the Tinker protocol in a thread, and a client of it that is not the SDK."""

import asyncio
import contextlib
import functools
import os
import socket
import sys
import threading
from pathlib import Path

import httpx
import torch

from prl.config.schema import ModelConfig, TinkerConfig
from prl.config.trainer import RanksConfig
from prl.engines.base import EngineSpec
from prl.engines.transformers import TransformersConfig
from prl.models import model_path
from prl.tinker import service
from prl.tinker.in_process import SnapshotsInProcess
from prl.tinker.learner import Learner
from prl.tinker.server import serve
from prl.trainer.model import load_model

KEY = "tml-of-the-tests"
LENGTH = 128


class Client:
    """Asks a server, and waits for results."""

    def __init__(self, url):
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": KEY}, timeout=60)

    def post(self, route, /, **body):
        answer = self.http.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, route, /, **body):
        """The status and the message of a request that is refused."""
        answer = self.http.post(route, json=body)
        assert answer.status_code != 200
        return answer.status_code, answer.json()["detail"]

    def result(self, answer):
        while True:
            result = self.post("/retrieve_future", request_id=answer["request_id"])
            if result.get("type") != "try_again":
                return result

    def do(self, route, /, **body):
        return self.result(self.post(route, **body))

    def session(self):
        return self.post("/create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]

    def model(self, rank=4, seed=1, **lora):
        """A new model of a new session, which counts its requests."""
        session = self.session()
        config = None if rank is None else {"rank": rank, "seed": seed, **lora}
        made = self.do("/create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config=config)
        assert made.get("type") == "create_model", made
        return Model(self, made["model_id"], session)


class Model:
    def __init__(self, client, model_id, session, number=0):
        self.client, self.id, self.session, self.number = client, model_id, session, number

    def send(self, route, /, number=None, **body):
        """Send a request with the next number, or with one that was there before."""
        if number is None:
            self.number += 1
            number = self.number
        return self.client.post(route, model_id=self.id, seq_id=number, **body)

    def do(self, route, /, **body):
        return self.client.result(self.send(route, **body))

    def train(self, data, loss="cross_entropy", config=None, **how):
        return self.client.result(
            self.send("/forward_backward", **how, forward_backward_input=given(data, loss, config))
        )

    def forward(self, data, loss="cross_entropy", config=None):
        return self.do("/forward", forward_input=given(data, loss, config))

    def step(self, **adam):
        return self.do("/optim_step", adam_params=adam)

    def logprobs(self, data):
        """Logprobs of the targets of each datum."""
        return [output["logprobs"]["data"] for output in self.forward(data)["loss_fn_outputs"]]

    def snapshot(self):
        """A sampling session over the model as it is."""
        self.number += 1
        body = {"model_id": self.id, "seq_id": self.number, "sampling_session_seq_id": self.number}
        return self.client.do("/save_weights_for_sampler", **body)["sampling_session_id"]

    def sample(self, sampler, prompt, n=1, seq=1, **more):
        params = {"max_tokens": 8, "temperature": 0.0} | more.pop("params", {})
        body = {"prompt": {"chunks": [{"tokens": prompt}]}, "sampling_params": params, "num_samples": n}
        return self.client.do("/asample", sampling_session_id=sampler, seq_id=seq, **body, **more)


def given(data, loss, config):
    return {"data": data, "loss_fn": loss, "loss_fn_config": config}


def tensor(values):
    values = torch.as_tensor(values)
    dtype = "float32" if values.is_floating_point() else "int64"
    return {"data": values.flatten().tolist(), "dtype": dtype, "shape": list(values.shape)}


def datum(tokens, targets, **inputs):
    inputs = {name: tensor(values) for name, values in {"target_tokens": targets, **inputs}.items()}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}, "loss_fn_inputs": inputs}


def text(length, seed=0, **weights):
    """A datum of random tokens, each of which predicts the next."""
    ids = torch.randint(20, 90, (length + 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    return datum(ids[:-1], ids[1:], weights=[1.0] * length)


def learner(**options):
    load = functools.partial(load_model, model_path("tiny"), max_model_len=LENGTH)
    trainer = RanksConfig(device="cpu", tokens_per_forward=64, **options)
    return Learner(lambda device: load(device=device), trainer, longest=LENGTH)


def serving(folder, listening, learner, **options):
    """Answer at a socket until cancelled."""
    config = TinkerConfig(name="tiny", dir=str(folder), engine=TransformersConfig(), **options)
    model = ModelConfig(path=model_path("tiny"), dtype="float32", max_model_len=LENGTH)
    names = {"process": "engine", "served_name": "tiny", "device": "cpu", "seed": 0, "token": "", "log": folder / "log"}
    spec = EngineSpec(model=model, config=config.engine, **names)
    return serve(config, learner, SnapshotsInProcess(spec), KEY, listening, "")


@contextlib.contextmanager
def running(folder, **options):
    """A server in a thread. Yields its client."""
    listening, own = socket.create_server(("127.0.0.1", 0)), learner()
    loop = asyncio.new_event_loop()
    task = loop.create_task(serving(folder, listening, own, **options))

    def run():
        asyncio.set_event_loop(loop)
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}")
    client.learner, client.folder = own, folder
    try:
        yield client
    finally:
        client.http.close()
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        listening.close()


def main(folder):
    """Fork a server for each line of stdin, once the one before has ended: what is slow is done before. Prints pids."""
    service.SAVED_S = 0.2  # states are written often enough to be killed beside
    listening, own = socket.create_server(("127.0.0.1", 0)), learner()
    print(listening.getsockname()[1], flush=True)
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(serving(Path(folder), listening, own))
        print(child, flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
