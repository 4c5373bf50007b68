"""The table of loss components, and a fourth one that is only an entry in it."""

import json
import os
import subprocess
import sys

import pytest

from prl.wire.components import COMPONENTS, stream_fill
from prl.wire.messages import TrainingSample


def sample(**fields):
    defaults = {
        "token_ids": [1, 2, 3, 4],
        "mask": [False, True, True, False],
        "logprobs": [0.0] * 4,
        "temperatures": [1.0] * 4,
        "env_name": "toy",
        "reward": 0.0,
    }
    return TrainingSample(**defaults | fields)


@pytest.mark.parametrize(
    ("fields", "rl", "ce", "ref_kl"),
    [
        ({}, [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ({"rl_weights": [1.0, 0.0, 0.5, 1.0]}, [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ({"ce_weights": [0.1, 0.0, 1.0, 0.0]}, [0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]),
        ({"rl_weights": [0.0] * 4, "ref_kl_weights": [0.0, 1.0, 0.0, -1.0]}, [0] * 4, [0] * 4, [0, 1, 0, 1]),
    ],
)
def test_members_of_a_sample(fields, rl, ce, ref_kl):
    found = sample(**fields)
    assert [found.members(COMPONENTS[name]) for name in ("rl", "ce", "ref_kl")] == [rl, ce, ref_kl]
    for name, members in (("rl", rl), ("ce", ce), ("ref_kl", ref_kl)):
        assert found.feeds(COMPONENTS[name]) == any(members)
        assert [found.feeds(COMPONENTS[name], n) for n in range(5)] == [any(members[:n]) for n in range(5)]


def test_the_streams_come_in_the_order_of_the_table():
    assert list(stream_fill(COMPONENTS)) == ["advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"]


def test_the_table_loads_neither_torch_nor_msgspec():
    code = "import sys, prl.wire.components, prl.wire.transport, prl.trainer.config as c, prl.wire\n"
    code += "c.TrainerConfig(); print([name for name in ('torch', 'msgspec', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout.strip() == "[]", done.stderr


FOURTH = '''
import json, math, sys, tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from prl.wire.components import COMPONENTS, Component

assert "prl.wire.messages" not in sys.modules
COMPONENTS["value"] = Component(
    name="value",
    loss="__main__.value_loss",
    reads_sampler=True,
    requires="returns",
    provider="its algorithm must write returns",
    metrics=frozenset({"value_error"}),
)

from prl.orchestrator.packing import pack
from prl.trainer.batch import stacks
from prl.trainer.export import TokenExport
from prl.trainer.loss import LossCounts, LossOutputs, TokenFates, compute_loss, count_members
from prl.wire.messages import STREAM_FILL, StepBatch, TrainingSample


def value_loss(inputs):
    """sum w * (t - return)^2"""
    error = (inputs.trainer_logprobs - inputs.streams["returns"])[inputs.loss_mask]
    return LossOutputs((inputs.loss_weights[inputs.loss_mask] * error**2).sum(), {"value_error": error.abs().mean()})


def make(n, **streams):
    return TrainingSample(token_ids=list(range(1, n + 1)), mask=[False] + [True] * (n - 1), logprobs=[-1.0] * n,
                          temperatures=[1.0] * n, env_name="toy", reward=0.0, **streams)


def refused(**streams):
    try:
        pack([make(3, advantages=[0.0] * 3, **streams)], 8, 1)
    except ValueError as error:
        return str(error)


assert list(STREAM_FILL) == ["advantages", "ref_logprobs", "returns", "rl_weights", "ce_weights", "ref_kl_weights",
                             "value_weights"]
missing, short = refused(value_weights=[0.0, 1.0, 1.0]), refused(value_weights=[1.0])
first = make(3, advantages=[0.0] * 3, value_weights=[0.0, 1.0, 0.5], returns=[9.0, -2.0, 1.0])
second = make(2, advantages=[0.0, 1.0], ce_weights=[0.0, 1.0])
third = make(2, advantages=[0.0] * 2, value_weights=[0.0, 2.0], returns=[0.0, 0.0])
third.logprobs[1] = -9999.0
(rows,), _ = pack([first, second, third], 10, 1)
(stack,) = stacks(rows, 100, torch.device("cpu"))
weights = {name: stream for name, stream in stack.streams.items() if name.endswith("_weights")}
members = count_members(inference_logprobs=stack.logprobs, loss_mask=stack.mask, **weights)
t = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
fates = TokenFates()
loss, metrics = compute_loss(trainer_logprobs=t, inference_logprobs=stack.logprobs.double(), loss_mask=stack.mask,
                             sequence_lengths=stack.sequence_lengths, counts=LossCounts.from_tensor(members),
                             fates=fates, **stack.streams)
loss.backward()
folder = Path(tempfile.mkdtemp())
export = TokenExport(folder, 0)
export.add(stack, t.detach(), fates)
export.write(StepBatch(1, rows, 0))
lines = [json.loads(line) for line in (folder / "tokens" / "step_000001" / "rank_0.jsonl").read_text().splitlines()]
print(json.dumps({"missing": missing, "short": short, "wanted": stack.wanted.tolist(), "members": members.tolist(),
                  "counts": vars(LossCounts.from_tensor(members)), "loss": loss.item(), "gradient": t.grad.tolist(),
                  "metrics": {k: [float(a), int(b)] for k, (a, b) in metrics.items()}, "lines": lines}))
'''


def test_a_fourth_component_is_one_entry_and_one_function(tmp_path):
    """t = i = -1 everywhere, so rho is 1. Tokens of the row: 0 1 2 (first), 3 4 (second), 5 6 (third)."""
    script = tmp_path / "fourth.py"
    script.write_text(FOURTH)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missing"] == (
        "env 'toy': a sample feeds the value loss but has no returns; its algorithm must write returns"
    )
    assert "value_weights has 1 values for 3 token_ids" in found["short"]
    # rl: tokens 1, 2, 4. Token 6 has no measured logprob: out of rl and of value. ce: token 4. value: tokens 1 and 2.
    assert found["members"] == [3, 1, 0, 2, 1]
    assert found["counts"] == {"rl": 3, "ce": 1, "ref_kl": 1, "value": 2, "invalid": 1, "rl_sequences": 1}
    assert found["wanted"] == [False, True, True, False, True, False, True]
    # rl: -A rho over 3 members = -1/3. ce: 1/1. value: (1 * (-1 + 2)^2 + 0.5 * (-1 - 1)^2) / 2 = 1.5.
    assert found["loss"] == pytest.approx(-1 / 3 + 1.0 + 1.5)
    # d value / dt = w * 2 (t - return) / 2: 1 * 1 and 0.5 * -2. d rl / dt4 = -1/3, d ce / dt4 = -1.
    assert found["gradient"] == pytest.approx([0, 1.0, -1.0, 0, -4 / 3, 0, 0])
    assert found["metrics"]["loss/value"] == [pytest.approx(3.0), 2]
    assert found["metrics"]["value_error"] == [pytest.approx(1.5), 1]  # mean of 1 and 2, one sequence
    assert found["metrics"]["mismatch_kl"] == [pytest.approx(0.0), 3]
    assert [line["fate"] for line in found["lines"]] == [
        ["context", "rl kept+value", "rl kept+value"],
        ["context", "rl kept+ce"],
        ["context", "invalid logprob"],
    ]
    assert [line["value_weights"] for line in found["lines"]] == [[0.0, 1.0, 0.5], [0.0, 0.0], [0.0, 2.0]]
    assert [line["returns"] for line in found["lines"]] == [[9.0, -2.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
