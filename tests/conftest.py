"""Children that say who they are, a look at which processes are left, and models that say what they are told to."""

import asyncio
import contextlib
import copy
import gc
import json
import os
import signal
import socket
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.nodeid import coerce_node_id
from aiohttp import web
from patience import patient

# verifiers, torch and transformers take seconds: the process that hands tests out to workers imports this file alone.

pytest_plugins = ["quick_compose", "engines", "inline"]  # the last two are shared by tests/e2e and tests/faults

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # for few kernels, a pool of processes that import torch takes longer
# torch keeps what it compiled for one instruction set, and takes it for another one's: it computes something else then.
_apart = f"torchinductor_{os.getuid()}_{os.environ.get('ATEN_CPU_CAPABILITY', 'all')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _apart))

# A shell that starts the tests in the background has them ignore SIGINT, and what they start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # nothing of what is imported and collected goes again: looking through it takes seconds


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """With `--dist loadgroup`: what is started once for several tests is started in one worker alone.

    pytest-xdist 3.8 writes groups into `_nodeid`, which pytest 9.2 does not read. To be removed with a later one.
    """
    for item in items:
        if "engine" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("engine"))
        group = item.get_closest_marker("xdist_group")
        if group is not None and item.config.getoption("loadgroup", False):
            item._id = coerce_node_id(f"{item.nodeid}@{group.args[0]}")


def gone(pid):
    """Whether no process of this id runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(name="gone")
def _gone():
    return gone


def processes_of(pid):
    """`pid` and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    found, newest = {pid}, {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest}
        found |= newest
    return found


def sockets_of(pid):
    """The TCP sockets that a process listens on, as (host, port), and its Unix sockets that have a path."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    tcp, unix = set(), set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                host = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))  # each in host order
                tcp.add((socket.inet_ntop(family, host), int(local.partition(":")[2], 16)))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        if len(parts := line.split()) == 8 and parts[5] == "01" and parts[6] in inodes:
            unix.add(parts[7])
    return tcp, unix


@pytest.fixture(scope="session")
def sockets():
    """`sockets(pid)`: what the process and its descendants listen on: TCP addresses, Unix sockets."""

    def find(pid):
        found = []
        for each in processes_of(pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found.append(sockets_of(each))
        return set().union(*(tcp for tcp, _ in found)), set().union(*(unix for _, unix in found))

    return find


@pytest.fixture(scope="session")
def default_config():
    from prl.config.compose import compose

    return compose(["run.name=x"])


@pytest.fixture
def config(default_config):
    """The default run's, to be changed."""
    return copy.deepcopy(default_config)


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    from prl.models import model_path

    return AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True)


@pytest.fixture(scope="session")
def renderer(tokenizer):
    from prl.engines.renderer import make_renderer

    return make_renderer(tokenizer, name="qwen3")


class Pids:
    """Processes write their ids to files in `folder`; whoever is left is ended with the test, by id."""

    def __init__(self, folder):
        self.folder = folder

    def wait(self, *names, timeout_s=20):
        """The ids of the named processes, once all have written theirs."""
        deadline = time.monotonic() + patient(timeout_s)
        while True:
            found = [path.read_text().strip() if (path := self.folder / f"{n}.pid").exists() else "" for n in names]
            if all(found):
                return [int(pid) for pid in found]
            assert time.monotonic() < deadline, f"no id of {names}: {found}"
            time.sleep(0.02)

    def wait_gone(self, *pids, timeout_s):
        deadline = time.monotonic() + patient(timeout_s)
        while left := [pid for pid in pids if not gone(pid)]:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.02)


@pytest.fixture
def pids(tmp_path):
    yield Pids(tmp_path)
    for path in tmp_path.glob("*.pid"):
        pid = int(path.read_text().strip() or 0)
        if pid and not gone(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sleeper(tmp_path):
    """`sleeper(name, setup="")`: a shell command that writes its id and sleeps in steps."""

    def make(name, setup=""):
        path = tmp_path / name  # moved into place, so that a reader never finds it empty
        return f"{setup} echo $$ > {path}.tmp; mv {path}.tmp {path}.pid; while :; do sleep 0.1; done"

    return make


class Server:
    """Answers each route with what `replies` holds for it: JSON, `(status, text)`, or an async function."""

    def __init__(self):
        self.replies = {"/prl/load_policy": {"loaded": "/w"}}
        self.calls = []
        self.bodies = defaultdict(list)
        self.headers = None
        self.port = 0
        self.instance = None

    async def handle(self, request):
        text = await request.text()
        self.calls.append(request.path_qs)
        self.bodies[request.path].append(json.loads(text) if text else None)
        self.headers = request.headers
        if request.headers.get("If-Match", self.instance) != self.instance:
            return web.Response(status=412, text="started anew")
        reply = self.replies.get(request.path, (404, "no such route"))
        if callable(reply):
            reply = await reply()
        if isinstance(reply, web.Response):
            return reply
        if isinstance(reply, tuple):
            return web.Response(status=reply[0], text=reply[1])
        return web.Response(text=json.dumps(reply), content_type="application/json")  # NaN as vLLM's encoder would

    async def start(self):
        """Listen; after a `stop`, at the same address."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self):
        await self.runner.cleanup()


@pytest.fixture
async def servers():
    """Two model servers."""
    found = [await Server().start(), await Server().start()]
    yield found
    for server in found:
        await server.stop()


@pytest.fixture
def server(servers):
    return servers[0]


class Scripted:
    """A sampler whose model says what the script has for it: a list of replies to each conversation, or a function of
    the conversation's name and the number of the reply. A reply is a text, one with its finish reason, an exception, or
    the texts of a group. Without a version it is a frozen model."""

    def __init__(self, renderer, script, *, room=10_000, delay=0.0, temperature=1.0, version=3, updates_per_call=0):
        self.renderer, self.tokenizer, self.script = renderer, renderer._tokenizer, script
        self.room, self.delay = room, delay
        self.config = SimpleNamespace(temperature=temperature)
        self.temperature = temperature
        self.pictures = getattr(getattr(renderer, "pictures", None), "store", None)
        self.pool = SimpleNamespace(model="policy", up=True)
        self.version, self.updates_per_call = version, updates_per_call
        self.requests = []
        self.asked = defaultdict(list)
        """The prompts of each conversation, as token ids."""

    def limited(self, max_tokens):
        return self

    async def complete(self, prompt, *, n, key, dialogue=None, prefix=None):
        from prl.engines.replies import Completion
        from prl.engines.sampler import OverlongPrompt

        if len(prompt) > self.room:
            raise OverlongPrompt("no room")
        self.requests.append(SimpleNamespace(prompt=prompt.token_ids, n=n, key=key, prefix=prefix))
        conversation = key.rpartition("/")[0]
        prompts = self.asked[conversation]
        prompts.append(prompt.token_ids)
        turn = len(prompts) - 1
        reply = self.script(conversation, turn) if callable(self.script) else self.script[turn]
        await asyncio.sleep(self.delay)
        if isinstance(reply, Exception):
            raise reply
        text, finish = reply if isinstance(reply, tuple) else (reply, "stop")
        ids = [self._ids(each, finish) for each in (text if isinstance(text, list) else [text] * n)]
        if self.version is None:
            return [Completion(each, [], finish) for each in ids]
        start, self.version = self.version, self.version + self.updates_per_call
        return [Completion(each, [-0.5] * len(each), finish, start, self.version) for each in ids]

    def _ids(self, text, finish):
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        return [*self.tokenizer.encode(text, add_special_tokens=False), *[end] * (finish == "stop")]


@pytest.fixture
def scripted(renderer):
    """`scripted(script)`: a `Scripted` sampler."""
    return lambda script, **how: Scripted(renderer, script, **how)


@pytest.fixture
def talk(renderer, tokenizer):
    from conversation import Talk

    return Talk(renderer, tokenizer)


@pytest.fixture
def user():
    from verifiers.v1.types import UserMessage

    return lambda text: UserMessage(content=text)
