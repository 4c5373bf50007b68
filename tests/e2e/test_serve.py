"""`python -m prl.serve`: an engine that runs train with, one after another, and what was trained for other programs."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import serve
from openai import OpenAI

from prl.launch.local import LocalLauncher

pytestmark = pytest.mark.engine


def test_runs_train_with_it_one_after_another(engine, train):
    """Each begins with the model's own weights, whatever the last one has trained. None writes the token anywhere."""
    options = ["trainer.optim.lr=1e-2", "orchestrator.eval.num_tasks=16", "orchestrator.batch_size=32"]
    runs = train(*options, "max_steps=1", name="first"), train(*options, "max_steps=1", name="second")
    assert [run.status for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stderr.startswith("starting trainer; reading the tasks\n")
    first, second = ({line["step"]: line.get("eval/math/avg@1") for line in run.steps} for run in runs)
    assert first[0] == second[0] != first[1]
    check_that_none_has(engine.token.encode(), runs[0])


def check_that_none_has(token, run):
    assert token not in run.stderr.encode()
    files = [path for path in run.dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "provenance.json", "orchestrator.log", "trainer.log"} <= {path.name for path in files}
    assert [path for path in files if token in path.read_bytes()] == []
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if folder.stat().st_uid == os.getuid():
                lines.append((folder / "cmdline").read_bytes())
    assert any(b"prl.engines.vllm.server" in line for line in lines)
    assert [line for line in lines if token in line] == []


PAGE = Path(__file__).parents[2] / "prl" / "SERVING.md"
PROGRAMS = dict(re.findall(r"^```(?:py|yaml)\n# (\w+).*?\n(.*?)^```", PAGE.read_text(), re.M | re.S))
ASIDE = Path(sys.prefix) / "clients"
"""Packages that do not go with prl's; `scripts/setup --clients` installs them."""
MODULES = {"inspect": "inspect_ai", "lm_eval": "lm_eval"}
ONE_PROCESS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
"""vLLM starts in a third of the time."""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_other_programs_use_a_run_as_the_page_says(inline, tmp_path):
    """All get the same reply of the same adapters; those that evaluate count the same replies as right."""
    assert ASIDE.is_dir(), "run scripts/setup --clients"
    run = inline("max_steps=2", "orchestrator.batch_size=32", "model.lora.rank=4", name="outputs/hello")
    assert run.status == 0, run.stderr
    with LocalLauncher() as launcher:
        printed = serve(launcher, tmp_path, "server", str(run.dir), "tools=true", token="the-key")
        [url] = re.findall(r"^  export OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=\$PRL_TOKEN$", printed, re.M)
        client = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "the-key"} | ONE_PROCESS
        replies = {
            name: said_by(PROGRAMS[name], tmp_path, client) for name in ("openai", "transformers", "peft", "vllm")
        }
        litellm = PROGRAMS["litellm"] + "print(reply.choices[0].message.content)"
        replies["litellm"] = said_by(litellm, tmp_path, client | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}, aside=True)
        asked = OpenAI(base_url=url, api_key="the-key").chat.completions
        reply = asked.create(model="hello", messages=[{"role": "user", "content": "1+1="}], tools=[ADD])
        assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")
        counted = counts_of_evaluations(asked, tmp_path, client)
    assert replies.pop("peft") == ""
    [text] = set(replies.values())
    assert re.fullmatch(r"-?\d+", text)
    assert 0 < counted["prl"] < 1 and counted == pytest.approx(dict.fromkeys(counted, counted["prl"]), abs=6e-4)


def counts_of_evaluations(asked, folder, client):
    """The share of sums that are right by each program of the page that evaluates, and counted here."""
    sums = {f"{first}+{second}=": str(first + second) for first in range(1, 9) for second in (3, 11)}
    lines = [json.dumps({"input": question, "target": answer}) for question, answer in sums.items()]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    (folder / "sums.py").write_text(PROGRAMS["inspect"])
    (folder / "sums.yaml").write_text(PROGRAMS["lm_eval"])
    right = []
    for question, answer in sums.items():
        messages = [{"role": "user", "content": question}]
        reply = asked.create(model="hello", messages=messages, temperature=0)
        right.append(reply.choices[0].message.content == answer)
    counted = {"prl": sum(right) / len(right)}
    for name, line in re.findall(r"^(inspect|lm_eval) (.*)", PAGE.read_text(), re.M):
        words = line.replace("$OPENAI_BASE_URL", client["OPENAI_BASE_URL"]).split()
        told = output_of(["-m", MODULES[name], *words], folder, client, aside=True)
        counted[name] = float(re.search(r"(?:^(?:accuracy|mean) |exact_match\|\W+\|) *([\d.]+)", told, re.M)[1])
    return counted


def said_by(program, folder, client, aside=False):
    """The last line that a program of the page prints."""
    program = program.replace("step_000200", "step_000002").replace(
        "max_model_len=512", "max_model_len=512, enforce_eager=True"
    )
    told = output_of(["-c", program], folder, client, aside)
    lines = [line for line in told.splitlines() if line and not line.startswith(("(", "INFO", "WARNING"))]
    return lines[-1] if lines else ""


def output_of(words, folder, client, aside=False):
    """What a Python program prints; `aside` finds the packages that lie aside and no others."""
    python = [sys.executable, "-S"] if aside else [sys.executable]
    environment = os.environ | client | ({"PYTHONPATH": str(ASIDE)} if aside else {})
    done = subprocess.run([*python, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout
