"""What the page of a run is made of, without a browser."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from made_run import make_run
from metrics_page import entry_of

from prl.runs.result import RunResult, write_result
from prl.tools.report import curves, examples, page, plots
from prl.tools.report.curves import KINDS
from prl.tools.report.examples import columns
from prl.tools.report.html import data_block, digest
from prl.tools.report.runs import read_run

SIZE = {"steps": 6, "rollouts": 32, "tokens_at": (1, 4, 6)}


@pytest.fixture
def run(tmp_path):
    """A run that may be changed."""
    return make_run(tmp_path / "run", **SIZE)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with its page."""
    run = make_run(tmp_path_factory.mktemp("page") / "run", **SIZE)
    page.write_page(run)
    return run


def data_of(run):
    """The data of a page for its script."""
    text = (run / "report.html").read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_page_loads_nothing_and_admits_only_its_script(written):
    text = (written / "report.html").read_text()
    script, style = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, re.S)[::-1]
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert f"script-src '{digest(script)}'" in policy and f"style-src '{digest(style)}'" in policy
    outside = r"(src|href|url\()\s*=?\s*[\"']?(http|//|data:(?!image/svg\+xml;base64,))"
    assert not re.search(outside, text.replace(policy, ""))
    assert " style=" not in text.replace(script, "")  # the policy would refuse it


def test_the_mean_step_stands_beside_the_median(run):
    """Ends at 20, 21, 24, 25, 28 and 29 s: (29 - 20) / 5, where the median of the six lines is (1 + 3) / 2."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = dict(zip(range(1, 7), [20, 1, 3, 1, 3, 1], strict=True))
    timed = [line | {"time/step": seconds[line["step"]]} for line in lines if line["step"] in seconds]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in timed))
    shown = page.page(read_run(run))
    assert "<b>1.8 s</b><span>per step, mean</span>" in shown and "<b>2 s</b><span>per step, median</span>" in shown


def test_data_cannot_leave_its_block():
    value = {"text": '</script><!-- & \\u2028 é \\ " \n\t', "</b>\x1b\x7f\x9b\u2028": ["\b\r\u202e\\x1b"]}
    block = str(data_block("data", value))
    inside = block.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert not set("<>&\u2028\u2029") & set(inside) and json.loads(inside) == {
        "text": value["text"],
        r"</b>\x1b\x7f\x9b\u2028": [r"\x08\r\u202e\x1b"],
    }


def test_examples_are_the_most_mixed_groups(written):
    data = data_of(written)
    assert [example["step"] for example in data["examples"]] == [1, 4, 6]
    lines = [json.loads(line) for line in (written / "rollouts" / "step_000006.jsonl").read_text().splitlines()]
    groups = {}
    for line in lines:
        groups.setdefault((line["env"], line["group"]), []).append(line["reward"])
    shown = {}
    for entry in data["examples"][2]["groups"]:
        rows = [data["rows"][place] for place in entry["rollouts"]]
        assert [row["reward"] for row in rows] == groups[rows[0]["env"], rows[0]["group"]][:8]
        assert all("messages" in row for row in rows)
        shown.setdefault(rows[0]["env"], []).append(abs(sum(row["reward"] for row in rows) / 8 - 0.5))
    for env, off in shown.items():
        every = sorted(abs(sum(rewards) / 8 - 0.5) for (other, _), rewards in groups.items() if other == env)
        assert off == every[: len(off)], "of rewards 0 and 1 those differ most whose mean is nearest to a half"
    assert any(row.get("sequences") for row in data["rows"])


def test_what_does_not_fit_is_left_out_and_named(run, monkeypatch):
    for name, most in (("ROLLOUTS", 40), ("GROUPS", 1), ("TEXT_BYTES", 2_000), ("PAGE_TOKENS", 100)):
        monkeypatch.setattr(examples, name, most)
    found = examples.read_rollouts(run)
    assert len(found.rows) == 64, "the step with the fortieth is the last"
    assert sum(len(sequence["text"]) for row in found.rows for sequence in row.get("sequences", [])) <= 100
    assert sum(len(json.dumps(row.get("messages", []))) for row in found.rows) < 2_400
    named = "; ".join(found.left_out)
    assert all(text in named for text in ("4 of 6 steps", "tokens beyond 100", "the messages of"))


def test_damaged_files_do_not_keep_the_page_back(run):
    for name in ("config.yaml", "result.json", "metrics.jsonl", "provenance.json", "rollouts/step_000006.jsonl"):
        (run / name).write_bytes(b'{"half": \xff\n[1, 2')
    (run / "tokens" / "step_000004" / "rank_0.jsonl").write_bytes(b"\xff\n")
    page.write_page(run)
    data = data_of(run)
    assert {row["step"] for row in data["rows"]} == {1, 2, 3, 4, 5}
    assert {row["step"] for row in data["rows"] if row.get("sequences")} == {1}


def test_files_of_other_names_are_left_out(run):
    page.write_page(run)
    whole = data_of(run)
    for name in ("step_000003 copy", "step_abc", "step_3", "step_"):
        (run / "rollouts" / f"{name}.jsonl").write_text("{}\n")
        (run / "tokens" / name).mkdir()
    page.write_page(run)
    assert data_of(run) == whole


def test_damaged_lines_of_tokens_are_left_out_and_named(run, caplog):
    page.write_page(run)
    whole = data_of(run)
    path = run / "tokens" / "step_000004" / "rank_0.jsonl"
    lines = path.read_text().splitlines()
    line = json.loads(lines[0])
    lists = {name: value for name, value in line.items() if isinstance(value, list)}
    damaged = [line | {name: value[1:]} for name, value in lists.items() if name not in ("temperature", "text")]
    damaged += [{key: line[key] for key in line if key != gone} for gone in ("use", "mask", "ratio", "token_ids")]
    damaged += [line | {"pictures": [each]} for each in (3, [1, 2], [1, 2, 3])]
    damaged += [line | {"trainer_logprobs": ["x"] * len(line["mask"])}, line | {"mask": 3}, {}, line | {"env": []}]
    path.write_text("".join(f"{each}\n" for each in [*map(json.dumps, damaged), "[]", '"x"', *lines]))
    page.write_page(run)
    assert data_of(run) == whole
    assert len([record for record in caplog.records if "tokens" in record.getMessage()]) >= len(lists)


def test_run_that_failed_before_step_one_has_a_page(tmp_path):
    write_result(tmp_path, RunResult("failed", "a\n<b>the engine</b> did not start"))
    text = page.write_page(tmp_path).read_text()
    assert "&lt;b&gt;the engine&lt;/b&gt; did not start" in text and data_of(tmp_path)["metrics"] == {}


def test_columns_are_what_the_loss_had():
    uses = ["context", "rl kept", "rl dropped", "invalid logprob"]
    line = {
        "token_ids": [5, 6, 7, 8],
        "text": None,
        "mask": [False, True, True, True],
        "inference_logprobs": [0.0, -0.5, -1.0, None],
        "trainer_logprobs": [None, -0.25, -3.0, -1.0],
        "ratio": [None, 1.284, 0.1353, None],
        "use": uses,
        "advantages": [0.0, 0.5, 0.5, 0.5],
        "ref_logprobs": [0.0, -1.25, -1.0, -1.0],
    }
    found = columns(line)
    assert found["text"] == ["⟨5⟩", "⟨6⟩", "⟨7⟩", "⟨8⟩"]
    assert [found["uses"][index] for index in found["use"]] == uses
    assert found["values"] == {
        "advantage": [None, 0.5, 0.5, 0.5],
        "policy logprob": [None, -0.25, -3.0, -1.0],
        "sampler logprob": [None, -0.5, -1.0, None],
        "log-ratio": [None, 0.25, -2.0, None],
        "ratio": [None, 1.284, 0.1353, None],
        "teacher logprob": [None, -1.25, -1.0, -1.0],
        "teacher divergence": [None, 1.0, -2.0, 0.0],
        "rl weight": [0.0, 1.0, 1.0, 1.0],
    }


def test_a_page_has_the_metrics_that_it_draws_and_no_others(written):
    lines = [json.loads(line) for line in (written / "metrics.jsonl").read_text().splitlines()]
    found = data_of(written)["metrics"]
    steps, values = found["entropy/all/mean"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert values == [float(f"{line['entropy/all/mean']:.4g}") for line in lines[1:]], "in four digits"
    assert found["eval/math/avg@1"] == [[0], [0.25]] and "rollouts/batch" not in found


def test_of_the_lines_of_a_step_the_last_counts_and_null_is_no_value():
    lines = [
        {"step": 1, "grad_norm": 3.0},
        {"step": 2, "grad_norm": None},
        {"step": 1, "grad_norm": 2.0},
        {"grad_norm": 1},
    ]
    assert curves.columns(lines) == {"grad_norm": ([1], [2.0])}


def test_a_fork_begins_with_the_curves_of_its_source(run, tmp_path):
    fork = make_run(tmp_path / "fork", **SIZE)
    line = {"step": 2, "checkpoint": f"{run}/checkpoints/step_000002"}
    (fork / "resumes.jsonl").write_text(json.dumps(line) + "\n")
    lines = (fork / "metrics.jsonl").read_text().splitlines(keepends=True)
    (fork / "metrics.jsonl").write_text("".join(lines[3:]))
    page.write_page(fork)
    assert data_of(fork)["before"]["entropy/all/mean"][0] == [1, 2]
    assert page.write_page(run) and data_of(run)["before"] == {}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title)
def test_a_panel_shows_metrics_of_the_catalogue(kind):
    if isinstance(kind.curves, str):
        made = [kind.curves.replace("(.+)", name).replace(r"\d+", "1") for name in ("math", "math/easy")]
        keys = [next(filter(entry_of, made))]
    else:
        keys = list(kind.curves.values())
    assert all(map(entry_of, keys))
    assert all(map(curves.is_drawn, keys))


def test_legends_have_the_colours_of_the_curves():
    style = (Path(page.__file__).parent / "templates" / "style.css").read_text()
    for place, colour in enumerate(plots.COLOURS):
        assert f"--s{place}: {colour};" in style


def test_long_curves_are_thinned_to_their_last_point():
    curve = pd.Series(range(12_345), dtype=float)
    assert len(plots.thinned(curve)) <= plots.POINTS and plots.thinned(curve).index[-1] == 12_344
    steps, values = curves.thinned({"entropy": (list(range(12_345)), [*curve])})["entropy"]
    assert len(steps) == len(values) <= curves.POINTS
    assert (steps[-1], values[-1]) == (12_344, 12_340), "steps whole, values in four digits"


def test_a_pipe_that_closes_early_leaves_the_page_and_no_complaint(tmp_path):
    make_run(tmp_path / "run", steps=1, rollouts=2)
    command = f"{sys.executable} -m prl.tools.report {tmp_path / 'run'} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "" and (tmp_path / "run" / "report.html").exists()
