"""The launcher that waits for nodes to join: whom it refuses, what it starts there, and what ends it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from patience import patient
from run_processes import family, running, wait_until

from prl.compose import compose
from prl.config.gpus import Place
from prl.config.instantiate import build
from prl.config.schema import InferenceConfig, ModelConfig
from prl.errors import ConfigError, PrlError
from prl.launch import channel, nodes
from prl.launch.channel import LARGEST, Admitted, Ended, Join, Leave, NodeEnd, Refused, own_report
from prl.launch.external import FOLDER, INVITATION, ExternalLauncher
from prl.launch.join import main as command
from prl.launch.launcher import EngineSpec, Launcher, ProcessDied, TrainerSpec
from prl.train import main
from prl.trainer.config import MEETING_VARIABLE
from prl.wire import curve
from prl.wire.curve import Invitation

RANK = "trainer rank 1"


def trainer(tmp_path, ranks=2):
    places = (Place(0), Place(1))[:ranks]
    model = ModelConfig(path="m")
    return TrainerSpec(run_dir=tmp_path / "run", model=model, payload={}, num_processes=ranks, places=places)


def engine(tmp_path, process, node):
    return EngineSpec(
        process=process,
        served_name="policy",
        model=ModelConfig(path="m"),
        config=InferenceConfig(host="0.0.0.0"),
        device="cpu",
        seed=0,
        token="secret",
        log=tmp_path / "engine.log",
        place=Place(node),
    )


@pytest.fixture
def launcher(tmp_path):
    """A launcher of two nodes."""
    (tmp_path / "run").mkdir()
    with ExternalLauncher(interface="lo", join_timeout_s=30) as launcher:
        yield launcher


@pytest.fixture
def gathering(launcher, tmp_path):
    """`gathering()`: the launcher waits for nodes. Returns the invitation, and what waits."""
    with ThreadPoolExecutor(1) as threads:

        def begin():
            waiting = threads.submit(launcher.gather, tmp_path / "run")
            path = tmp_path / "run" / FOLDER / INVITATION
            wait_until(lambda: path.exists() or waiting.done(), 20, "the invitation")
            return path, waiting

        yield begin
        launcher.join_timeout_s = 0.0


@pytest.fixture
def join(tmp_path):
    """`join(invitation)`: a node of the run as a process of this machine, its output in `said`."""
    begun = []

    def begin(invitation, program=("-m", "prl.launch.join")):
        path = tmp_path / f"node{len(begun)}.said"
        with path.open("w") as said:
            begun.append(subprocess.Popen([sys.executable, *program, str(invitation)], stdout=said, stderr=said))
        begun[-1].said = path.read_text
        return begun[-1]

    yield begin
    for node in begun:
        node.kill()
        node.wait()


@pytest.fixture
def joined(gathering, join, launcher):
    """The node, which has joined."""
    path, waiting = gathering()
    node = join(path)
    waiting.result()
    return node


@pytest.fixture
def peer():
    """`peer(invitation)`: a node's end of the channel, in this process."""
    ends = []

    def begin(invitation):
        ends.append(NodeEnd(invitation))
        return ends[-1]

    yield begin
    for end in ends:
        end.close()


def answer(end, timeout_s=10):
    """The next message that says something."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if isinstance(message := end.receive(0.05), Admitted | Refused | Leave):
            return message
    return None


def start(launcher, tmp_path, script, name=RANK, **env):
    log, place = tmp_path / "run" / "logs" / "a.log", Place(1 if name == RANK else 0)
    return launcher.start(name, ["sh", "-c", script], env=env, log=log, place=place)


def ended(process, timeout_s=15):
    wait_until(lambda: process.status is not None, timeout_s, f"the end of {process.name}")
    return process.status


# --- who may join -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("launcher.nodes=1", "launcher.nodes must be at least 2, got 1"),
        ("launcher.port=0", "launcher.port must be from 1 to 65535, got 0"),
        ("launcher.join_timeout_s=0", "launcher.join_timeout_s must be"),
        ("launcher.interface='a b'", "launcher.interface='a b' must be one word"),
        ("launcher.interface=nosuch0", "launcher.interface=nosuch0: the interfaces of this .* are (.*, )?lo(,|$)"),
        (
            "launcher.interface='lo,nosuch0'",
            "launcher.interface=lo,nosuch0: the interfaces of this .* are (.*, )?lo(,|$)",
        ),
    ],
)
def test_knobs_that_are_refused(overrides, says):
    config = compose(["run.name=x", "launcher=external", overrides])
    with pytest.raises(ConfigError, match=says):
        build(config.launcher, Launcher, "launcher")


def test_an_interface_that_is_not_this_machines_is_refused_before_anything_is_made(tmp_path):
    places = ("launcher=external", "launcher.interface=nosuch0", "trainer.num_processes=2", "launcher.join_timeout_s=1")
    for dry in (False, True):
        config = compose(["run.name=x", f"run.dir={tmp_path}/run", *places, f"dry_run={str(dry).lower()}"])
        with pytest.raises(
            ConfigError, match="launcher.interface=nosuch0: the interfaces of this machine that have an address are"
        ):
            main(config)
    assert not list(tmp_path.iterdir())


def test_an_address_that_is_not_this_machines_is_refused_before_anything_is_prepared(tmp_path):
    with ExternalLauncher(host="203.0.113.1") as launcher:
        with pytest.raises(PrlError, match="cannot listen on 203.0.113.1"):
            launcher.import_ahead([], trainer(tmp_path, 1))
        with pytest.raises(PrlError, match="launcher.host='203.0.113.1', launcher.port=None: cannot listen there"):
            launcher.gather(tmp_path)


def test_it_listens_at_loopback_unless_told_otherwise_and_the_invitation_is_for_the_user_alone(
    gathering, launcher, sockets
):
    path, _ = gathering()
    port = int(Invitation.read(path).address.rpartition(":")[2])
    assert {host for host, listened in sockets(os.getpid())[0] if listened == port} == {"127.0.0.1"}
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    launcher.stop()
    assert not path.exists()


@pytest.mark.parametrize("what", ["readable", "link", "fifo", "garbage", "missing"])
def test_an_invitation_that_somebody_else_could_have_made_is_not_used(tmp_path, what):
    path = tmp_path / "invitation.json"
    Invitation("tcp://127.0.0.1:1", "k", "t").write(path)
    assert Invitation.read(path).token == "t"
    says = "is not a file of this user's that nobody else may read"
    if what == "readable":
        path.chmod(0o640)
    elif what == "link":
        path = path.with_name("link")
        path.symlink_to("invitation.json")
        says = "cannot be read"
    elif what == "fifo":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif what == "garbage":
        path.write_text('{"address": 3}')
        says = "is no invitation to a run"
    else:
        path.unlink()
        says = "does this node see that folder, and has the run ended"
    with pytest.raises(PrlError, match=says):
        Invitation.read(path)


def test_a_wrong_token_and_a_wrong_key_are_refused(gathering, join, launcher, tmp_path, peer, capsys):
    path, waiting = gathering()
    right = Invitation.read(path)
    for name, wrong, says in (
        ("token", Invitation(right.address, right.key, "0" * 48), "the launcher refuses this node: its token is not"),
        ("key", Invitation(right.address, zmq.curve_keypair()[0].decode(), right.token), "is another than that of the"),
        ("port", Invitation("tcp://127.0.0.1:1", right.key, right.token), "does not answer"),
    ):
        other = tmp_path / name / "invitation.json"
        other.parent.mkdir()
        wrong.write(other)
        node = join(other)
        assert node.wait(20) == 1 and says in node.said(), node.said()
    assert not launcher.joined and not waiting.done()
    assert "is refused: its token is not that of this run" in capsys.readouterr().err


def test_another_version_too_few_gpus_no_such_interface_and_one_node_too_many_are_refused_with_both_sides_named(
    gathering, launcher, peer, monkeypatch
):
    launcher.gpus_per_node = 1
    path, waiting = gathering()
    invitation = Invitation.read(path)
    mine = channel.versions()
    assert set(mine) == {"prl", "python", "torch", "vllm", "interpreter"} and mine["torch"].startswith("2.")

    def report(gpus=1, interfaces=("lo", "ib0"), **versions):
        end = peer(invitation)
        end.send(Join(invitation.token, "hostb", gpus, 4, list(interfaces), mine | versions))
        return answer(end)

    assert report(torch="1.0").reason == f"all nodes need the same versions: torch 1.0 there, {mine['torch']} here"
    assert report(gpus=0).reason == "launcher.gpus_per_node=1, and it has 0"
    its = "its interfaces that have an address are eth0, ib0"
    assert report(interfaces=["eth0", "ib0"]).reason == f"launcher.interface=lo, and {its}"
    assert not launcher.joined
    assert report() == Admitted(str(path.parents[1]))
    waiting.result()
    end = peer(invitation)
    end.send(Join(invitation.token, "hostc", 1, 4, ["lo"], mine))
    wait_until(lambda: launcher.listen() or end.socket.poll(50), 5, "an answer")
    assert answer(end).reason == "the run has its launcher.nodes=2 nodes already"


def test_what_a_node_says_of_itself_moves_no_cursor_and_is_short(gathering, launcher, peer, capsys):
    path, waiting = gathering()
    invitation = Invitation.read(path)
    mine, host = channel.versions(), "a\x1b[2J\nerror: b" + "x" * 100_000
    for token, interfaces, versions in (
        ("", ["lo"], mine),
        (invitation.token, ["lo"], mine | {"torch": host}),
        (invitation.token, [host], mine),
    ):
        end = peer(invitation)
        end.send(Join(token, host, 0, 4, interfaces, versions))
        assert isinstance(refused := answer(end), Refused)
        assert "\x1b" not in refused.reason and len(refused.reason) < 600
    end = peer(invitation)
    end.send(Join(invitation.token, host, 0, 4, ["lo"], mine))
    assert isinstance(answer(end), Admitted)
    waiting.result()
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("node ")]
    assert len(lines) == 4 and all(line.startswith("node a\\x1b[2J error: bxxx") for line in lines)
    assert "\x1b" not in said and max(map(len, lines)) < 800
    assert launcher.joined[0].host == lines[-1].partition(" (127.0.0.1)")[0].removeprefix("node ")


def test_strangers_change_nothing(gathering, launcher, peer, tmp_path):
    """Without the key, without the token, with what is no message, or about another node's process."""
    path, waiting = gathering()
    invitation = Invitation.read(path)
    plain = zmq.Context()
    bare = plain.socket(zmq.DEALER)
    bare.connect(invitation.address)
    with contextlib.suppress(zmq.Again):  # it has been turned away already
        bare.send(msgspec.json.encode(own_report(invitation.token)), zmq.NOBLOCK)
    assert bare.poll(500) == 0, "no answer to what is not encrypted"
    plain.destroy(0)
    node, stranger, large = peer(invitation), peer(invitation), peer(invitation)
    for content in (b"", b"\xff", b"[" * 100_000, b'{"type":"Join"}', b'{"type":"Leave"}', b'{"type":"Ended","x":1}'):
        stranger.socket.send(content)
    large.socket.send(b" " * (LARGEST + 1))
    with pytest.raises(PrlError, match="is gone"):
        answer(large)
    node.send(own_report(invitation.token))
    assert isinstance(answer(node), Admitted)
    waiting.result()
    process = start(launcher, tmp_path, "sleep 60")
    stranger.send(Ended(0, 0, []))
    time.sleep(0.2)
    assert process.status is None
    node.send(Ended(0, 3, ["trainer: why"]))
    assert ended(process) == 3
    where = f"process 'trainer rank 1' on node 2 ({launcher.joined[0].host})"
    assert process.ending() == f"{where} ended with status 3: why (its log: {tmp_path}/run/logs/a.log)"


def test_a_node_that_has_not_reported_is_named_at_the_deadline(gathering, launcher, peer):
    launcher.nodes, launcher.join_timeout_s = 4, 1.5
    path, waiting = gathering()
    invitation = Invitation.read(path)
    leaving, staying = peer(invitation), peer(invitation)
    for end, name in ((leaving, "hosta"), (staying, "hostb")):
        end.send(Join(invitation.token, name, 0, 1, ["lo"], channel.versions()))
        assert isinstance(answer(end), Admitted)
    leaving.close()  # its place is free again
    with pytest.raises(PrlError) as raised:
        waiting.result()
    assert str(raised.value).startswith(
        "launcher.nodes=4: node 3, 4 had not reported after 1.5 s (launcher.join_timeout_s); node 2 is hostb. Give"
    )


def test_what_a_person_is_told(gathering, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    path, _ = gathering()
    said = capsys.readouterr().err
    assert f"    cd {Path.cwd()} && {sys.executable} -m prl.launch.join {path}\n" in said
    assert "this machine alone reaches" in said and f"each must see {tmp_path}/run, the model and prl" in said
    assert Invitation.read(path).token not in said


def test_the_command_for_a_node_has_the_search_path_of_this_one(gathering, capsys, monkeypatch):
    paths = "/my code:/it's:/$HOME"
    monkeypatch.setenv("PYTHONPATH", paths)
    path, _ = gathering()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "prl.launch.join" in line]
    look = line.replace(f"-m prl.launch.join {path}", "-S -c 'import os; print(os.environ.get(\"PYTHONPATH\"))'")
    monkeypatch.delenv("PYTHONPATH")  # as in the shell of another node
    assert subprocess.run(["sh", "-c", look], check=True, capture_output=True, text=True).stdout == f"{paths}\n"


def test_the_run_directory_is_as_good_as_the_invitation_in_it(gathering, join, tmp_path):
    _, waiting = gathering()
    node = join(tmp_path / "run")
    waiting.result()
    wait_until(lambda: f"joined the run in {tmp_path}/run" in node.said(), 10, node.said)


def test_a_run_directory_without_an_invitation_is_named_with_it(join, tmp_path):
    node = join(tmp_path)
    assert node.wait(20) == 1
    assert node.said().startswith(f"error: {tmp_path}/external/invitation.json cannot be read (No such file")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_says_how_it_is_used(capsys, option):
    assert command([option]) == 0
    assert "    python -m prl.launch.join <run directory" in capsys.readouterr().out


# --- processes there --------------------------------------------------------------------------------------------------


def test_a_process_runs_on_the_node_that_its_place_is_on(joined, launcher, tmp_path, monkeypatch):
    ranks = launcher._ranks(trainer(tmp_path))
    assert {env["GLOO_SOCKET_IFNAME"] for env in ranks.values()} == {"lo"}
    assert {Path(env[MEETING_VARIABLE]).parent for env in ranks.values()} == {tmp_path / "run" / FOLDER}
    script = "echo $WORD $PRL_SCRATCH; readlink /proc/$PPID/cwd; exit 4"
    far, near = start(launcher, tmp_path, script, WORD="hello"), start(launcher, tmp_path, "exit 0", "trainer rank 0")
    assert (ended(far), ended(near)) == (4, 0) and far.where and not near.where
    word, scratch = (tmp_path / "run" / "logs" / "a.log").read_text().splitlines()[0].split()
    assert word == "hello" and launcher.scratch is not None and scratch != str(launcher.scratch.path)
    assert far.lines()[0] == f"hello {scratch}" and [each.name for each in launcher.conditions()] == []
    with pytest.raises(ProcessDied, match=r"process 'trainer rank 1' on node 2 \(.*\) ended with status 4"):
        launcher.ensure_alive()
    launcher.stop()
    assert joined.wait(20) == 0 and "the run has ended" in joined.said()
    assert not Path(scratch).exists()


def test_what_a_process_is_given_is_on_no_command_line_and_what_cannot_start_says_so(joined, launcher, tmp_path):
    process = start(launcher, tmp_path, "sleep 60", SECRET="hidden-word")
    running = lambda: any(line.startswith("sleep 60") for line in family(joined.pid).values())  # noqa: E731
    wait_until(running, 10, "the process itself, not its reaper")
    token = launcher.channel.invitation.token
    everything = {**family(joined.pid), **family(os.getpid())}
    assert not any("hidden-word" in line or token in line for line in everything.values())
    process.ask()
    assert ended(process) == 128 + signal.SIGTERM
    nowhere = launcher.start(RANK, ["sh"], env={}, log=Path("/proc/nowhere/a.log"), place=Place(1))
    assert ended(nowhere) == 1
    assert nowhere.last_words().startswith("it cannot be started: ")


def test_one_that_does_not_hear_is_killed_with_all_below_it(joined, launcher, tmp_path, sleeper, pids):
    deaf = "trap '' TERM;"
    (tmp_path / "below.sh").write_text(sleeper("below", deaf))
    process = start(launcher, tmp_path, f"sh {tmp_path}/below.sh & {sleeper('above', deaf)}")
    both = pids.wait("above", "below")
    process.ask()
    time.sleep(0.5)
    assert process.status is None and all(map(running, both))
    process.end()
    assert process.status is not None
    pids.wait_gone(*both, timeout_s=2)


def test_an_engine_is_reached_where_its_node_reported_from(joined, launcher, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        launcher, "elsewhere", lambda place, name, *_: started.append((place.node, name)) or SimpleNamespace()
    )
    monkeypatch.setattr("prl.launch.nodes.LocalLauncher.start", lambda *_, **__: None)
    urls = [
        launcher.start_engine(engine(tmp_path, name, node)) for node, name in enumerate(("inference", "inference 2"))
    ]
    assert urls[0].startswith("http://0.0.0.0:") and urls[1].startswith("http://127.0.0.1:")
    assert started == [(1, "inference 2")]
    launcher.processes.clear()
    launcher.joined[0].address = "fe80::1"
    assert launcher.address(1) == "[fe80::1]"


def test_without_nodes_nothing_is_started_on_them(tmp_path):
    with ExternalLauncher() as launcher, pytest.raises(ConfigError, match="launcher=external is for prl train"):
        launcher.start_engine(engine(tmp_path, "inference 2", 1))


# --- who ends whom ----------------------------------------------------------------------------------------------------


def test_a_node_that_is_stopped_counts_as_gone(monkeypatch, gathering, join, launcher, tmp_path, sleeper, pids):
    monkeypatch.setattr(curve, "SILENT_S", 1.0)
    path, waiting = gathering()
    node = join(path)
    waiting.result()
    start(launcher, tmp_path, sleeper("rank"))
    pids.wait("rank")
    time.sleep(2)
    launcher.ensure_alive()
    node.send_signal(signal.SIGSTOP)
    with pytest.raises(ProcessDied, match="node 2 .* is gone"):
        asyncio.run(asyncio.wait_for(launcher.watch(), 10))
    node.send_signal(signal.SIGCONT)
    assert node.wait(15) == 1 and "is gone: what it had started here has ended" in node.said()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_goes_is_named_and_leaves_nothing(joined, launcher, tmp_path, sleeper, pids, number):
    process = start(launcher, tmp_path, sleeper("rank"))
    [rank] = pids.wait("rank")
    launcher.ensure_alive()
    joined.send_signal(number)
    began = time.monotonic()
    with pytest.raises(ProcessDied) as raised:
        asyncio.run(asyncio.wait_for(launcher.watch(), 10))
    said = f"node 2 ({launcher.joined[0].host}) is gone, and with it process 'trainer rank 1': the command there was"
    if number == signal.SIGKILL:
        assert time.monotonic() - began < patient(2) and str(raised.value).startswith(said)
        late = launcher.start(RANK, ["sh"], env={}, log=tmp_path / "b.log", place=Place(1))
        assert late.status is not None, "nothing starts there any more"
        launcher.engines["inference 2"] = engine(tmp_path, "inference 2", 1), 1
        assert launcher.restart_engine("inference 2") is False
    assert raised.value.process == RANK and process.status is not None
    pids.wait_gone(rank, timeout_s=8)


LAUNCHER = """
import sys, time
from pathlib import Path
from prl.config.gpus import Place
from prl.launch.external import ExternalLauncher
folder = Path(sys.argv[1])
with ExternalLauncher(interface="lo") as launcher:
    launcher.gather(folder / "run")
    launcher.start("rank", ["sh", str(folder / "rank.sh")], env={}, log=folder / "a.log", place=Place(1))
    sum(iter(int, 1))  # without end, and without letting Python do anything else
"""


IMPATIENT = """
import runpy
from prl.wire import curve
curve.SILENT_S = 1.0
runpy.run_module("prl.launch.join", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_launcher_that_goes_ends_what_runs_on_the_nodes_and_a_busy_one_does_not(
    tmp_path, join, sleeper, pids, number
):
    (tmp_path / "run").mkdir()
    (tmp_path / "rank.sh").write_text(sleeper("rank"))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        path = tmp_path / "run" / FOLDER / INVITATION
        wait_until(path.exists, 30, "the invitation")
        node = join(path, program=("-c", IMPATIENT))
        [rank] = pids.wait("rank", timeout_s=30)
        if number == signal.SIGKILL:  # once is enough
            time.sleep(3)
            assert node.poll() is None
        below = family(node.pid)
        launcher.send_signal(number)
        assert node.wait(15) == 1, node.said()
    finally:
        launcher.kill()
        launcher.wait()
    assert "is gone: what it had started here has ended" in node.said() and "Traceback" not in node.said()
    pids.wait_gone(rank, *below, timeout_s=2)


def test_the_environment_of_a_run_that_passes_is_within_the_limit_of_a_message():
    assert len(json.dumps({"PRL_CONFIG": "x" * 131072})) * 8 < LARGEST, "the kernel takes 128 KiB for a variable"


@pytest.mark.parametrize(
    ("places", "address"),
    [
        ([Place(0)], "127.0.0.1"),
        ([Place(0, (0,)), Place(0, (1,))], "127.0.0.1"),
        ([Place(0), Place(1)], "10.0.0.5"),
        ([Place(1)], "10.0.0.5"),
    ],
)
def test_ranks_on_other_nodes_reach_the_orchestrator_on_the_interface_that_was_named(monkeypatch, places, address):
    monkeypatch.setattr(nodes, "address_of", lambda interface: {"ib0": "10.0.0.5"}[interface])
    assert ExternalLauncher(interface="ib0,eth0").reached_at(places) == address
