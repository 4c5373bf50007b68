"""A real engine that receives weights, from memory and from a process group, answers as one started with them.

Each architecture is vLLM's own, in a process of its own whose second thread is the trainer; greedy tokens and every
logprob are compared exactly.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from engines import policy_spec

from prl.launch.local import engine_environment
from tests.inference.test_load_in_place import MODELS, saved

CODE = """
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from prl.inference import _vllm_start

_vllm_start.without_sockets()
import torch
from vllm import LLM, SamplingParams

from prl.inference.server import TRANSFER
from prl.trainer.model import load_model
from prl.trainer.transfer import bucketed, specs_of
from prl.wire.buckets import buckets
from prl.wire.meeting import meet
from prl.wire.peers import called_off

PROMPT = {"prompt_token_ids": list(range(3, 60))}
GREEDY = SamplingParams(max_tokens=16, temperature=0, prompt_logprobs=0, logprobs=0, detokenize=False)
CPU, LIMIT = torch.device("cpu"), 100_000


def engine(path):
    return LLM(
        model=path, dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=512,
        max_num_seqs=8, enforce_eager=True, enable_chunked_prefill=False, enable_prefix_caching=False,
        distributed_executor_backend="uni", worker_extension_cls="prl.inference._vllm_transfer.PolicyWorker",
        weight_transfer_config={"backend": TRANSFER},
    )


def answer(llm):
    [reply] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    tokens = [*reply.prompt_token_ids[1:], *reply.outputs[0].token_ids]
    found = [*reply.prompt_logprobs[1:], *reply.outputs[0].logprobs]
    return [(token, known[token].logprob) for token, known in zip(tokens, found, strict=True)]


def send(model, store, stop_after=None, group=False):
    tempfile.tempdir = folder + "/" + "x" * 100 if group else None  # no socket has so long a path
    peers = meet(store, 0, 2, device=CPU, timeout_s=60)
    tempfile.tempdir = None
    assert type(peers).__name__ == ("Group" if group else "Shared")
    cut = list(buckets(specs_of(model, torch.float32), LIMIT))
    memory = peers.buffers(cut)
    for number, packed in enumerate(bucketed(model, torch.float32, cut, memory)):  # each has passed before the next
        if number == stop_after:
            called_off(store).touch()
            break
        peers.wait(peers.broadcast(packed))
    return peers


def transfer(llm, path, store, **options):
    model = load_model(path, device=CPU)
    held = []
    trainer = threading.Thread(target=lambda: held.append(send(model, store, **options)))
    trainer.start()
    meeting = {"store": store, "world_size": 2, "rank_offset": 1, "timeout_s": 60.0}
    specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs_of(model, torch.float32)]
    update = {"tensors": specs, "bucket_bytes": LIMIT, "timeout_s": 60.0}
    said = llm.collective_rpc("join_transfer", kwargs={"meeting": meeting})
    said += llm.collective_rpc("receive_policy", kwargs={"update": update})
    trainer.join()
    if said == [None, None] and all(llm.collective_rpc("prepares")):
        llm.collective_rpc("take_over")
    return said


old, new, folder, told = sys.argv[1:]
os.mkdir(folder + "/" + "x" * 100)
fresh = answer(engine(new))
llm = engine(old)
said = {"fresh": fresh, "before": answer(llm)}
said["first"] = transfer(llm, new, folder + "/peers-1")
said["after"] = answer(llm)
said["second"] = transfer(llm, old, folder + "/peers-2", group=True)
said["back"] = answer(llm)
began = time.monotonic()
said["cut"] = transfer(llm, new, folder + "/peers-3", stop_after=3)
said["seconds"] = time.monotonic() - began
said["unharmed"] = answer(llm)
said["again"] = transfer(llm, new, folder + "/peers-4")
said["healed"] = answer(llm)
llm.llm_engine.model_executor.driver_worker.worker.packed_layers = None  # vLLM's own reload from here on
said["reload"] = transfer(llm, old, folder + "/peers-5")
said["reloaded"] = answer(llm)
said["reload by group"] = transfer(llm, new, folder + "/peers-8", group=True)
said["reloaded by group"] = answer(llm)
said["reload cut"] = transfer(llm, new, folder + "/peers-6", stop_after=3)
try:
    transfer(llm, new, folder + "/peers-7", stop_after=0)
except Exception as error:
    said["refused"] = str(error)
Path(told).write_text(json.dumps(said), encoding="utf-8")
"""


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_answers_with_what_it_has_received(tmp_path, name):
    old, new = (saved(MODELS[name], tmp_path / part, seed) for part, seed in (("old", 0), ("new", 1)))
    env = engine_environment(replace(policy_spec("t", tmp_path / "log"), threads=1))
    arguments = [str(old), str(new), str(tmp_path), str(tmp_path / "told")]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], env={**os.environ, **env}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(Path(tmp_path / "told").read_text())
    assert said["first"] == said["second"] == [None, None]
    assert said["before"] != said["fresh"], "else the test shows nothing"
    assert said["after"] == said["fresh"] and said["back"] == said["before"]
    [joined, reason] = said["cut"]
    assert joined is None and "called off" in reason and said["seconds"] < 30
    assert said["unharmed"] == said["before"], "it goes on with those that it has"
    assert said["again"] == [None, None] and said["healed"] == said["fresh"]
    assert said["reload"] == [None, None] and said["reloaded"] == said["before"]
    assert said["reload by group"] == [None, None] and said["reloaded by group"] == said["fresh"]
    assert "called off" in said["reload cut"][1]
    assert "an earlier load failed half-way: start the engine again" in said["refused"]
