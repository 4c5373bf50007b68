"""`--help`: groups, options and keys with what the code says of them, without loading what is heavy."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from prl import help
from prl.compose import options
from prl.errors import ConfigError


def test_all_groups_options_and_keys_of_the_top_level_are_there():
    page = help.page("train", ["--help"])
    for group in set(options()) - {"filter"}:
        assert f"\n  {group} " in page or f"\n  {group}\n" in page, group
        assert all(name in page for name in options()[group])
    assert "grpo                      Group-relative policy optimisation" in page
    assert "on_policy                 Synchronous and on-policy" in page
    assert "max_steps=200               Training steps." in page
    assert "prl train --from <run>" in page and "--cfg job --resolve" in page
    assert all(len(line) <= 120 for line in page.splitlines())


def test_serve_has_its_own():
    page = help.page("serve", ["-h"])
    assert "tiny-teacher" in page and "Name that a frozen model is served under." in page
    assert "grpo" not in page and "--from" not in page


def test_an_evaluation_and_a_chat_have_theirs():
    evaluation, chat = help.page("eval", ["tiny", "--help"]), help.page("chat", ["tiny", "--help"])
    assert evaluation.startswith("usage: prl eval <") and chat.startswith("usage: prl chat <")
    assert "endpoint> … [group" in evaluation and "endpoint> [group" in chat
    assert all(text in evaluation for text in ("  k=8 ", "  env\n", "  monitor\n"))
    assert not any(text in chat for text in ("  k=8 ", "  env\n", "  monitor\n", "targets", "experiment"))
    assert "tiny-teacher" not in evaluation + chat, "a model is a target there, no option"
    assert "Sample from the most likely tokens" in help.page("chat", ["tiny", "-h", "sampling.top_p"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["algo=opd"],
            ["algo.max_concurrent=32      Scoring requests in flight.", "algo.teacher.name=${"],
        ),
        (["loss=aipo"], ["loss._target_=prl.trainer.loss.aipo", "loss.delta="]),
        (["sampling.top_p"], ["sampling.top_p=1.0          Sample from the most likely tokens"]),
        (["envs.math.weight=3"], ["envs.math.weight=3.0        Share of rollouts relative to the other envs."]),
        (["envs.math_retry", "env=math_retry"], ["Operands are integers from 0 to this."]),
        (
            ["envs.math"],
            ["envs.math.args.max_operand=99", "Operands are integers from 0 to this.", "Which split to draw from"],
        ),
        (["envs.jsonl", "env=jsonl"], ["The key of a row's prompt.", "`exact`, `numeric`, `math_verify`"]),
        (["env"], ["kuhn_poker                A card game of two"]),
        (["trainer.schedule", "max_steps"], ["Final learning rate as a share of the peak.", "Training steps."]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_group_a_node_or_a_key_is_explained(arguments, says):
    page = help.page("train", ["--help", *arguments])
    assert all(text in page for text in says), page


@pytest.mark.parametrize("taskset", ["no_such_module_xyz", "no.such.module_xyz", "me/x", "", "..x"])
def test_a_taskset_that_is_not_there_has_no_docs(taskset):
    assert help.docs_of_taskset(taskset) == {}


@pytest.mark.parametrize(("key", "near"), [("algoo", "did you mean algo?"), ("trainer.optim.lrr", "trainer.optim.lr")])
def test_a_key_that_is_not_there_is_refused_with_the_nearest(key, near):
    with pytest.raises(ConfigError, match=f"--help {key}: there is no such key or group; .*{near}"):
        help.page("train", ["--help", key])


def test_the_docs_of_fields_are_read_from_the_source():
    @dataclass
    class Base:
        a: int = 1
        """Of a."""
        b: int = 2

    @dataclass
    class Sub(Base):
        b: int = 3
        """Of b,
        in two lines."""

    assert help.docs_of(Sub) == {"a": "Of a.", "b": "Of b, in two lines."}
    assert help.docs_of(dict) == {}


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"]])
def test_a_reader_that_goes_ends_it_quietly(arguments, tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "prl.train", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(write)
    assert done.returncode == -signal.SIGPIPE and done.stderr == ""


def test_the_docs_of_a_taskset_need_no_import_of_it(tmp_path):
    code = "import sys; from prl.help import docs_of_taskset as d; assert d('prl.envs.math'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert not {"prl.envs.math", "verifiers", "torch"} & set(done.stdout.split())


@pytest.mark.parametrize("module", ["prl.train", "prl.serve", "prl.chat"])
def test_the_command_prints_it_and_imports_nothing_heavy(module, tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0 and done.stdout.startswith("usage: prl ")
    assert not [name for name in ("torch", "vllm", "verifiers", "transformers") if f"| {name}\n" in done.stderr]
    assert all(len(line) <= 100 for line in done.stdout.split("Groups")[1].splitlines())
