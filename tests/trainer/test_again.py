"""Trained again from the same batches, a trainer process arrives at the same weights, bit by bit."""

import copy

import pytest
from safetensors.torch import load_file

from prl.compose import compose
from prl.launch.local import resolve_model
from prl.launch.specs import trainer_payload
from prl.orchestrator.packing import pack
from prl.trainer import worker
from prl.wire.files import FileTransport
from prl.wire.messages import StepBatch

STEPS = 3
CASES = {
    "defaults": [],
    "gspo with a reference": ["loss=gspo", "loss.entropy_coef=0.01"],
    "sgd": ["trainer.optim._target_=torch.optim.SGD", "+trainer.optim.momentum=0.9"],
    "adapters": ["model.lora.rank=4"],
    "two threads": ["trainer.threads=2"],
}


def train(config, samples, folder, reference):
    """The weights after all steps of a trainer that is a process's own, from batches of `samples(step)`."""
    folder.mkdir()
    transport = FileTransport(folder)
    for step in range(1, STEPS + 1):
        rows = pack(samples(step), 48, 1)[0][0]
        transport.send_batch(StepBatch(step, rows, 0), 0)
    payload = trainer_payload(config, resolve_model(config.model, "cpu"), initial_reference=reference)
    worker.run(copy.deepcopy(payload), folder)
    return load_file(transport.weights_path(STEPS) / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_the_same_batches_give_the_same_weights(make_sample, tmp_path, monkeypatch, case):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the worker sets for the libraries that it loads
    reference = "reference" in case
    config = compose([f"run.dir={tmp_path}/run", f"max_steps={STEPS}", "trainer.optim.lr=1e-2", *CASES[case]])

    def samples(step, shift=0):
        for number in range(6):
            length = 12 + (5 * number + step) % 9
            pulled = {"initial_reference": True, "ref_kl_weights": [0.2 * (place >= 4) for place in range(length)]}
            asked = pulled if reference and number % 2 else {}
            yield make_sample(length, 4, seed=7 * step + number // 3 + shift, env_name="math", **asked)

    first = train(config, lambda step: list(samples(step)), tmp_path / "first", reference)
    again = train(config, lambda step: list(samples(step)), tmp_path / "again", reference)
    other = train(config, lambda step: list(samples(step, shift=100)), tmp_path / "other", reference)
    assert all(first[name].equal(again[name]) for name in first)
    assert not all(first[name].equal(other[name]) for name in first), "so the batches were read"
