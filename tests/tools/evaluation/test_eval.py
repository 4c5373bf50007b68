"""An evaluation without an engine: what is refused before anything starts, what is written, what is shown."""

import json
from functools import partial
from pathlib import Path

import hydra
import pytest
from msgspec.structs import replace
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from prl import eval as command
from prl.base.errors import ConfigError, EngineError, PrlError
from prl.config.compose import CONF, to_config
from prl.config.evaluation import EvaluationConfig
from prl.engines.client import InferencePool
from prl.launch.shared_engines import launcher_of
from prl.models import model_path
from prl.tools.evaluation import play
from prl.tools.evaluation.arguments import to_overrides
from prl.tools.evaluation.serving import serve_each
from prl.tools.evaluation.table import table
from prl.tools.rollouts.__main__ import main as view


def compose(*arguments):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        overrides = ["run.name=x", "envs.math.args.num_tasks=4", *to_overrides(arguments)]
        return to_config(EvaluationConfig, hydra.compose("eval", overrides), overrides)


@pytest.fixture
def serve(monkeypatch, make_pool):
    """`serve(*replies)`: in place of engines, a model for each target."""

    def use(*replies):
        async def each(make_launcher, engines, work):
            targets = [target for served in engines for target in served.targets]
            for target, reply in zip(targets, replies, strict=True):
                await work(target, make_pool(reply))

        monkeypatch.setattr(play, "serve_each", each)

    return use


def lines(name):
    return [json.loads(line) for line in (Path("outputs/x") / name).read_text().splitlines()]


def test_what_an_evaluation_leaves(serve, capsys):
    [answer] = [
        task.data.answer for task in play.evaluation_of(compose("tiny", "num_tasks=1")).envs[0].environment.eval_tasks
    ]
    serve("no number", str(answer))
    result = command.main(compose("tiny", "tiny-teacher", "num_tasks=3", "k=4"))
    assert result.status == "completed" and json.loads(Path("outputs/x/result.json").read_text())["steps"] == 1
    metrics = lines("metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1]
    assert [line["eval/math/avg@4"] for line in metrics] == [0.0, pytest.approx(result.targets[1].envs[0].avg.mean)]
    first, second = json.loads(Path("outputs/x/result.json").read_text())["targets"]
    assert first["path"] == model_path("tiny") and first["envs"][0]["difference"] is None
    assert second["envs"][0]["difference"]["mean"] == second["envs"][0]["avg"]["mean"] > 1 / 3 - 1e-9
    assert [line["start_version"] for line in lines("rollouts/eval_math_step_000001.jsonl")] == [0] * 12
    assert "targets:\n- tiny\n- tiny-teacher\n" in Path("outputs/x/config.yaml").read_text()
    with (console := Console(width=130)).capture() as printed:
        console.print(table(result))
    rows = [[cell.strip() for cell in line.split("│")] for line in printed.get().splitlines() if "│" in line]
    assert rows[0][1:-1] == ["tiny", "math", "0.000", "0.000", "0.000", "0.000", "", ""]
    assert rows[1][3] == "[0.000, 0.000]" and rows[2][7].startswith("+0.") and "3 tasks, 4 samples" in printed.get()
    score = result.targets[0].envs[0]
    of_two = replace(result.targets[0], name="m[/x]", envs=[score, replace(score, env="maze", tasks=2)])
    with (console := Console(width=200)).capture() as printed:
        console.print(table(replace(result, targets=[of_two])))
    assert "3 math, 2 maze tasks, 4 samples each." in printed.get() and "m[/x] are paired by task" in printed.get()
    capsys.readouterr()
    assert view(["outputs/x", "--eval"]) == 0 and "evaluation at step 1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already holds a run"):
        command.main(compose("tiny"))


def test_a_model_that_does_not_answer_has_no_score(serve):
    serve(EngineError("http://h is gone", 503))
    with pytest.raises(PrlError, match="tiny did not answer 6 of 6 rollouts; first: .*http://h is gone"):
        command.main(compose("tiny", "num_tasks=3", "k=2"))
    result = json.loads(Path("outputs/x/result.json").read_text())
    assert result["status"] == "failed" and "did not answer" in result["error"] and result["targets"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny", "k=0"], "k="),
        (["tiny", "num_tasks=0"], "num_tasks="),
        (["tiny", "model.dtype=int4"], "model.dtype=int4: "),
        (["tiny", "envs.math.eval_args=null"], r"envs.math.eval_args is null: the env has no held-out tasks"),
        (["tiny", "~envs.math"], "no env: choose one"),
        (["tiny", "engine.urls=[http://h]"], "set PRL_TOKEN to their token"),
        (["tiny", "launcher=slurm"], "SlurmLauncher starts no server here"),
        (["tiny", "launcher=inline"], "InlineLauncher starts no server here"),
        (["tiny", "model.renderer=glm5"], "model.renderer"),
        (["tiny", "sampling.stop=['']"], "sampling.stop has an empty string"),
    ],
)
def test_what_is_refused_before_anything_starts(arguments, says, monkeypatch, serve):
    serve()
    monkeypatch.delenv("PRL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=says):
        command.main(compose(*arguments))
    assert not Path("outputs").exists()


def test_rows_without_an_answer_are_not_evaluated(tmp_path, serve):
    serve()
    (tmp_path / "chat.jsonl").write_text('{"prompt": "p", "completion": "c"}')
    with pytest.raises(ConfigError, match=r"^envs\.jsonl\.args: .*line 1 has no answer, which grader=exact reads"):
        command.main(compose("tiny", "env=[math,jsonl]", f"envs.jsonl.args.path={tmp_path / 'chat.jsonl'}"))


def test_a_running_engine_cannot_load_two_shapes(make_model, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "t")
    folder = make_model("wide", intermediate_size=999)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"engine.urls: one engine cannot load both tiny and wide"):
        play.evaluation_of(compose("tiny", "wide", "engine.urls=[http://h]"))


async def test_running_engine_gets_weights_of_each_target(server, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "t")
    server.replies["/health"] = {}
    config = compose("tiny", "tiny-teacher", f"engine.urls=[{server.url}]")
    seen = []

    async def work(target, pool):
        assert isinstance(pool, InferencePool)
        seen.append((target.name, pool.version, server.bodies["/prl/load_policy"][-1]["path"]))

    await serve_each(partial(launcher_of, config.launcher), play.plan_engines(config, Path("log")), work)
    assert seen == [("tiny", 0, model_path("tiny")), ("tiny-teacher", 1, model_path("tiny-teacher"))]
