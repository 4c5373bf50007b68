"""Code of a reply: what it computes comes back; whatever else it does costs its own time at most and leaves nothing."""

import asyncio
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from prl.envs import sandbox
from prl.envs.sandbox import FAILED, SandboxFailed, evaluate, hides_files

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the sandbox is Linux'")
SECONDS = 1.0


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No process, no file: in the folder of temporary files, which is this test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) == before
    assert list(tmp_path.iterdir()) == []


def run(code, *expressions, seconds=10.0):
    return asyncio.run(evaluate(code, expressions=expressions, seconds=seconds, memory_mb=256))


def test_values_come_back_as_they_are_and_what_raises_fails_alone():
    code = "import math, re, random, collections, hashlib\ndef f(x): return x + 1"
    asked = ["f(2)", "f('a')", "(1, {3, 2}, b'e', set(), (), [1j])", "object()", "f(3)"]
    assert run(code, *asked) == [3, FAILED, (1, {3, 2}, b"e", set(), (), [1j]), FAILED, 4]
    of_classes = ["collections.Counter('aab')", "iter([1])", "{'a': None, 1: -2.5}", "re.I", "'\\n\\ud800é'", "True"]
    assert run(code, *of_classes) == [{"a": 2, "b": 1}, FAILED, {"a": None, 1: -2.5}, 2, "\n\ud800é", True]
    assert run(
        "import threading\nt = threading.Thread(target=globals().update, kwargs={'y': 3})\nt.start(); t.join()", "y"
    ) == [3]
    assert run("open('own', 'w').write('x')", "open('own').read()", "open('/dev/null', 'w').write('x')") == ["x", 1]


def test_a_package_that_is_asked_for_can_be_imported_and_no_other():
    def run_with_numpy(code, *expressions):
        options = {"seconds": 20.0, "memory_mb": 256, "packages": ["numpy"]}
        return asyncio.run(evaluate(code, expressions=expressions, **options))

    code = "import numpy, numpy.testing, numpy.ma, numpy.random"
    assert run_with_numpy(code, "numpy.allclose(numpy.arange(3) @ numpy.eye(3), [0, 1, 2])") == [True]
    assert run_with_numpy("import pandas", "1") == run_with_numpy("import pip", "1") == run("import numpy", "1") == []
    assert run_with_numpy(READS["of what is installed"], "1") == []
    assert run_with_numpy(ENDED["forks"], "1") == []


def test_a_run_with_more_files_open_than_select_takes_grades_code():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200
    if hard != resource.RLIM_INFINITY:
        assert hard >= wanted, "this machine lets a process open too few files for this test"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert run("x = 3", "x + 1") == [4]
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ENDED = {
    "is no Python": "def f(:",
    "raises": "1 / 0",
    "exits": "import os; os._exit(0)",
    "forks": "import os\nwhile True: os.fork()",
    "spawns": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "runs another program": "import os; os.execv('/bin/sleep', ['sleep', '60'])",
    "clones by hand": "import ctypes\nassert ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) >= 0",
    "fills memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "fills the disk with one file": "f = open('a', 'w')\nwhile True: f.write('x' * 100000); f.flush()",
    "fills the disk with many": "i = 0\nwhile True: i += 1; open(str(i), 'w').write('x' * 100)",
    "makes folders": "import os\nwhile True: os.mkdir('a'); os.chdir('a')",
    "locks its folder": "import os; os.chmod('.', 0)",
    "links": "import os; os.symlink('/etc/passwd', 'a')",
    "connects": "import socket; socket.create_connection(('127.0.0.1', 22))",
    "kills the run": "import os; os.kill(os.getppid(), 9)",
    "kills all": "import os; os.kill(-1, 9)",
    "lifts its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "pairs sockets": "import socket; socket.socketpair()",
    "has a pipe signal the run": "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "outlives the run": "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "attaches shared memory": "import ctypes; assert ctypes.CDLL(None).shmctl(0, 2, bytes(256)) != -1",
    "allocates unseen": "import os; os.posix_fallocate(os.open('a', os.O_CREAT | os.O_RDWR), 0, 100)",
    "hides a file": "import os; open('a', 'w').close(); os.unlink('a')",
    "makes a file without a name": "import os; os.open('.', os.O_TMPFILE | os.O_RDWR)",
    "limits the run": "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
}
WAITED_FOR = {
    "starts threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "sleeps": "import time; time.sleep(600)",
    "spins": "while True: pass",
    "backtracks": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "prints without end": "while True: print('x' * 10000)",
    "ignores signals": "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)",
    "closes its output": "import os, time\nos.closerange(0, 20)\ntime.sleep(600)",
}
READS = {
    "a file": "open({secret!r}).read()",
    "a folder": "import os; os.listdir({folder!r})",
    "the run's memory": "import os; open(f'/proc/{{os.getppid()}}/environ').read()",
    "its own": "open('/proc/self/environ').read()",
    "the home": "import os; os.listdir('/root')",
    "outside by a path through its folder": "open('../' + {secret!r}.split('/')[-1]).read()",
    "and writes": "open({folder!r} + '/new', 'w')",
    "and truncates": "import os; os.truncate({secret!r}, 0)",
    "and marks": "import os; os.setxattr({secret!r}, 'user.a', b'1')",
    "and dates": "import os; os.utime({secret!r}, (0, 0))",
    "of what is installed": "import os; open(os.path.dirname(os.__file__) + '/site-packages/pip/__init__.py')",
    "and removes": "import os; os.remove({secret!r})",
}


@pytest.mark.parametrize("kind", [*ENDED, *WAITED_FOR])
def test_code_that_does_harm_fails_and_leaves_nothing(kind):
    started = time.monotonic()
    assert run((ENDED | WAITED_FOR)[kind], "1", seconds=SECONDS if kind in WAITED_FOR else 10.0) == []
    assert time.monotonic() - started < SECONDS + 4


@pytest.mark.parametrize("kind", READS)
def test_code_reads_nothing_outside_its_folder(kind, tmp_path_factory):
    if not hides_files():
        pytest.skip("this kernel has no Landlock")
    folder = tmp_path_factory.mktemp("theirs")
    secret = folder / "secret"
    secret.write_text("mine")
    assert run(READS[kind].format(secret=str(secret), folder=str(folder)), "1") == []
    assert secret.read_text() == "mine" and [path.name for path in folder.iterdir()] == ["secret"]


def test_output_beyond_a_bound_and_output_that_is_none_of_json_is_not_read():
    assert 65 <= len(run("", *["'x' * 1000"] * 1000)) <= 130  # of a kilobyte each
    assert run("", "'x' * 10**6") == []
    forged = "import os\nfor n in range(32):\n  try: os.write(n, {line!r})\n  except OSError: pass"
    values = run(forged.format(line=b"[" * 5000 + b"\n" + b"9" * 5000 + b"\n"), "1")
    assert values == [FAILED, FAILED, 1]


def test_a_cancelled_rollout_leaves_nothing_once_its_code_has_had_its_time(tmp_path):
    async def cancelled():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await evaluate("import time; time.sleep(60)", expressions=["1"], seconds=SECONDS, memory_mb=256)

    asyncio.run(cancelled())
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)


def test_code_is_not_run_where_it_could_do_harm(monkeypatch, tmp_path_factory):
    """Here the program is one that has no rights to give up."""
    program = tmp_path_factory.mktemp("program") / "broken.py"
    text = Path(sandbox.sandboxed.__file__).read_text().replace('"x86_64"', '"none"').replace('"aarch64"', '"neither"')
    program.write_text(text)
    monkeypatch.setattr(sandbox, "COMMAND", [*sandbox.COMMAND[:-1], str(program)])
    for attempt in (lambda: run("", "1"), hides_files):
        with pytest.raises(SandboxFailed, match=f"not known on {os.uname().machine}"):
            attempt()
