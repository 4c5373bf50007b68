"""A Slurm cluster of this machine alone, for `scripts/slurm_here` and the tests: Debian's slurm-wlm and munge."""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CONF = """
ClusterName=prl
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=30
{nodes}
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Gres=gpu:1"
GPUS = "Name=gpu File=/dev/null\n"
"""A GPU on each node, in Slurm's books alone: of jobs that ask for one, one is on a node at a time."""
START_S, END_S = 60, 20
"""Deadlines of the daemons to start and to end, seconds."""


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    with contextlib.ExitStack() as listening:
        sockets = [listening.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def states(env: dict[str, str]) -> list[str]:
    """The state of each node, as `sinfo` has it."""
    return subprocess.run(["sinfo", "-hNo", "%T"], env=env, capture_output=True, text=True).stdout.split()


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 1) -> Iterator[dict[str, str]]:
    """Run a controller and `nodes` nodes of eight CPUs, all on loopback, with their files in `folder`.

    Yields the environment in which `sbatch` and the others talk to it. A job that is requeued waits five seconds, not
    two minutes (`cred_expire`). Raises RuntimeError where a program is missing or the nodes do not come.
    """
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name, path=path) is None]:
        raise RuntimeError(f"no {', '.join(missing)}: scripts/test_packages says what to install")
    folder.mkdir()
    host, names = socket.gethostname(), [f"node{number + 1}" for number in range(nodes)]
    port, *ports = free_ports(1 + nodes)
    lines = [NODE.format(name=name, host=host, port=each) for name, each in zip(names, ports, strict=True)]
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "seed-file")
    ]
    munged = ["munged", "--foreground", "--force", f"--log-file={folder}/munged.log", *files]
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    with contextlib.ExitStack() as running, (folder / "daemons.log").open("w") as log:
        # Jobs have sockets there, whose paths may have 107 characters: where one is longer, no job starts.
        spool = running.enter_context(tempfile.TemporaryDirectory(prefix="slurm-"))
        values = {"host": host, "user": getpass.getuser(), "folder": folder, "spool": spool, "port": port}
        (folder / "slurm.conf").write_text(CONF.format(**values, nodes="\n".join(lines)))
        (folder / "gres.conf").write_text(GPUS)
        for command in (munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)):
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            running.callback(stop, daemon)
        running.callback(end_jobs, env)
        deadline = time.monotonic() + START_S
        while states(env) != ["idle"] * nodes:
            if time.monotonic() > deadline:
                raise RuntimeError((folder / "daemons.log").read_text())
            time.sleep(0.2)
        yield env


def stop(daemon: "subprocess.Popen[bytes]") -> None:
    """End a daemon, and wait for it."""
    daemon.terminate()
    daemon.wait(END_S)


def end_jobs(env: dict[str, str]) -> None:
    """End the jobs that are left: nobody would, once their node's daemon is gone."""
    subprocess.run(["scancel", "--state=PENDING,RUNNING,SUSPENDED"], env=env, capture_output=True)
    subprocess.run(["scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}"], env=env, capture_output=True)
    deadline = time.monotonic() + END_S
    while subprocess.run(["squeue", "-h"], env=env, capture_output=True).stdout and time.monotonic() < deadline:
        time.sleep(0.2)
