"""The metrics of a model: a line a step in its folder, which is read as a run's, and a line on the terminal."""

import asyncio
import contextlib
import json
import math

import pytest
from tinker_server import datum, running, text

from prl.tinker import metrics
from prl.tinker.metrics import Busy, Meters
from prl.tools.report.page import write_page
from prl.tools.report.runs import read_run
from prl.tools.report.summary import summarise


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_a_step_and_how_it_goes_on(tmp_path):
    with running(tmp_path) as client:
        model = client.model(rank=2, seed=3)
        folder = tmp_path / "models" / model.id.replace(":", "-")
        sampler = model.snapshot()
        replies = model.sample(sampler, [30, 31], n=3, params={"temperature": 1.0, "max_tokens": 5, "stop": []})
        passes = [model.train([text(12)]), model.train([text(8), text(5)])]
        model.forward([text(50)])  # trains nothing
        norm = model.step(learning_rate=0.01)["metrics"]["unclipped_grad_l2:mean"]
        assert [len(sequence["tokens"]) for sequence in replies["sequences"]] == [5, 5, 5]
        [logprobs] = model.logprobs([text(6)])
        # Two tokens of the reply, of which the sampler was off by 0.1 and 0.2, behind four of the prompt.
        given = [0.0] * 4 + [logprobs[4] - 0.1, logprobs[5] + 0.2]
        ids = [token for key in ("model_input", "loss_fn_inputs") for token in tokens_of(text(6)[key])]
        model.train([datum(ids[:6], ids[6:12], logprobs=given, advantages=[0.0] * 4 + [1.0, -1.0])], "ppo")
        model.step(learning_rate=0.02)
        assert read_run(folder).status == "running"
        client.http.post(
            f"/sessions/{model.session}/finish", json={"reason": {"type": "errored"}, "detail": "no money"}
        )
        ended = read_run(folder)
        assert (ended.status, ended.result.error, ended.result.steps) == ("failed", "no money", 2)
        model.train([text(4)])
        assert read_run(folder).status == "running"
    run = read_run(folder)
    assert (run.status, run.problems, run.config["seed"], run.config["loss"]) == ("stopped", [], 3, "cross_entropy")
    assert run.config["model"]["lora"] == {"rank": 2}
    first, second = lines_of(folder)
    loss = sum(done["metrics"]["loss:sum"] for done in passes)
    expected = {"step": 1, "lr": 0.01, "grad_norm": norm, "loss:sum": loss, "loss/ce": loss / 25, "tokens/trained": 25}
    expected |= {"tokens/forward": 25, "tokens/generated": 15, "length/all/mean": 5.0, "truncated/all": 1.0}
    assert {key: first[key] for key in expected} == pytest.approx(expected)
    assert 0 < first["time/train"] < first["time/step"] and 0 <= first["idle/engine"] <= 1
    assert "loss/rl" not in first and "loss/ce" not in second and "length/all/mean" not in second
    expected = {"step": 2, "lr": 0.02, "tokens/trained": 2, "tokens/forward": 6, "logprob_gap/mean": 0.15}
    expected["mismatch_kl/all/mean"] = (math.exp(0.1) - 1.1 + math.exp(-0.2) - 0.8) / 2
    assert {key: second[key] for key in expected} == pytest.approx(expected, abs=1e-4)
    assert summarise([run]).metrics == ["loss/ce", "loss/rl", "grad_norm"]
    assert all(f'"{key}"' in write_page(folder).read_text() for key in ("loss/rl", "grad_norm", "idle/trainer"))


def tokens_of(part):
    return part["chunks"][0]["tokens"] if "chunks" in part else part["target_tokens"]["data"]


async def test_the_terminal_shows_work_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "EVERY_S", 0.05)
    meters = Meters("a model")
    showing = asyncio.ensure_future(meters.show(lambda: "models=\x1b[1m"))
    await asyncio.sleep(0.12)
    assert capsys.readouterr().err == ""
    with meters.busy["engine"].working():
        meters.tokens["sampled"] += 100
        await asyncio.sleep(0.12)
    showing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await showing
    line = capsys.readouterr().err.splitlines()[0]
    assert "2,000 sampled" in line and "0 trained" in line and "trainer 0%" in line and "\x1b" not in line


def test_work_at_the_same_time_counts_once(monkeypatch):
    now = iter([10.0, 11.0, 13.0, 13.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    busy = Busy()
    with busy.working(), busy.working():
        assert busy.seconds == 1.0
    assert busy.seconds == 3.0
