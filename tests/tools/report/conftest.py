"""Run directories, as small as they may be."""

import json

import pytest


@pytest.fixture
def write_run():
    """`write_run(folder, lines, config=…, result=…, overrides=…)`: a run directory."""

    def write(folder, lines=(), config="seed: 0\n", result=None, overrides=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if result is not None:
            (folder / "result.json").write_text(json.dumps(result))
        if overrides is not None:
            (folder / ".hydra").mkdir(exist_ok=True)
            (folder / ".hydra" / "overrides.yaml").write_text(overrides)
        return folder

    return write


@pytest.fixture
def sweep(tmp_path, write_run):
    """A sweep over `lr`: two seeds with 0.1, two with 0.2 of which one crashed at step 2; and a refused job."""

    def job(name, lr, seed, evals, *, steps=4, result=True):
        lines = [{"step": step, "tokens/generated": 10, "time/step": 2} for step in range(1, steps + 1)]
        lines = [line | {"reward/all/mean": 0.1 * line["step"]} for line in lines]
        for step, value in evals.items():
            lines = [line | {"eval/m/avg@1": value} if line["step"] == step else line for line in lines]
        ended = {"status": "completed", "steps": steps, "seconds": 12.5}
        write_run(
            tmp_path / "sweep" / name,
            [{"step": 0, "eval/m/avg@1": 0.2}, *lines],
            f"seed: {seed}\noptim: {{lr: {lr}}}\nrun: {{name: {name}}}\n",
            ended if result else None,
            f"- optim.lr={lr}\n- seed={seed}\n",
        )

    job("0-lr=0.1,seed=0", 0.1, 0, {4: 0.6})
    job("1-lr=0.1,seed=1", 0.1, 1, {4: 0.8})
    job("2-lr=0.2,seed=0", 0.2, 0, {4: 0.5})
    job("3-lr=0.2,seed=1", 0.2, 1, {2: 0.9}, steps=2, result=False)
    refused = tmp_path / "sweep" / "4-lr=<b>|x"
    refused.mkdir()
    (refused / ".hydra").mkdir()
    (refused / ".hydra" / "overrides.yaml").write_text("- optim.lr=<b>|x\n- seed=0\n")
    error = {"status": "refused", "error": "optim.lr=<b>|x is not a number\nsecond line"}
    (refused / "result.json").write_text(json.dumps(error))
    return tmp_path / "sweep"
