"""A grader of somebody else's that never returns: the run can be stopped. tests/envs has what else they do."""

import os
import signal
import subprocess
import textwrap

import pytest
from run_processes import family, running, wait_until

pytestmark = pytest.mark.slow

ENV = """
    import verifiers.v1 as vf
    __all__ = ["StuckTaskset"]

    class StuckTask(vf.Task):
        @vf.reward
        async def answer(self, trace: vf.Trace) -> float:
            open("spins", "w").close()
            while True:
                pass

    class StuckTaskset(vf.Taskset[StuckTask, vf.TasksetConfig]):
        def load(self):
            for number in range(50):
                yield StuckTask(vf.TaskData(prompt=f"{number}+{number}="))
"""
CHOSEN = ("env=stuck", "hydra.searchpath=[file://.]", "orchestrator.eval.every=null", "envs.stuck.timeout_s=600")


def test_a_run_whose_graders_spin_answers_sigterm(inline_command, tmp_path):
    (tmp_path / "stuck_env.py").write_text(textwrap.dedent(ENV).lstrip())
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "stuck.yaml").write_text("# @package envs.stuck\ntaskset: stuck_env\n")
    argv, env = inline_command(*CHOSEN)
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: (tmp_path / "spins").exists() or process.poll() is not None, 240, "a grader spins")
        processes = family(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, stderr
    wait_until(lambda: not any(map(running, processes)), 10, "all processes are gone")
