"""The launcher for a Ray cluster: each engine and each rank of the trainer is a process that an actor owns."""

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar

import ray
import ray.exceptions
import ray.util
from annotated_types import Gt
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from prl.base.checkpoint_folders import MANIFEST
from prl.base.errors import ConfigError, PrlError
from prl.base.text import in_one_line
from prl.config.build import build
from prl.config.hardware import cores
from prl.config.validate import THIS_MACHINE
from prl.engines.base import EngineSpec
from prl.launch import children
from prl.launch.cluster import connect
from prl.launch.host import Host, Node
from prl.launch.launcher import Launcher, ProcessDied
from prl.launch.local import base_url, rank_log
from prl.launch.plan import Bundle, TrainerSpec, amounts, bundle_of, in_words, worker_name
from prl.launch.relay import Relay
from prl.transport.events import TRAINER
from prl.transport.files import FileTransport
from prl.transport.ray import CHUNK, RayTransport, ready
from prl.weights.base import Weights
from prl.weights.transfer import ADDRESS_VARIABLE

QUIET_S = 10.0
"""Time that the cluster may take to give what is asked for before the run says what that is, seconds."""
CHILDREN_LIVE = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Else Ray kills the supervisor of an actor's process, which is to end everything below it (`children.py`)."""
UNRESERVED = 8
"""Cores for processes that nothing was reserved for, where Ray is started for them."""
ANSWER_S = 60.0
"""Deadline for an actor to start and to answer, seconds."""
LOST = 256
"""Stands for the status of a process whose actor is gone."""
EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(kw_only=True)
class RayLauncher(Launcher):
    """Starts each process where Ray places it, in an actor that owns it: several machines are a Ray cluster."""

    address: str | None = None
    """A cluster to join, `auto` or `<host>:6379`; null = that of RAY_ADDRESS, else start Ray here for the run."""
    wait_s: Annotated[float, Gt(0)] = 300.0
    """Deadline for the cluster to have the resources of the run, seconds."""

    places_processes: ClassVar[bool] = True
    bundles: list[Bundle] = field(default_factory=list, init=False, repr=False)
    """Parts of the placement group, a bundle for each process."""
    group: Any = field(default=None, init=False, repr=False)
    """The placement group; None = nothing was reserved."""
    hosts: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """The actor of each process."""
    nodes: dict[str, Node] = field(default_factory=dict, init=False, repr=False)
    """Node of each process, by name."""
    engines: dict[str, EngineSpec] = field(default_factory=dict, init=False, repr=False)
    ends: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Answer of a process's actor once the process has ended, by name."""
    relay: Relay = field(default_factory=Relay, init=False, repr=False)
    joined: bool = field(default=False, init=False, repr=False)
    """It was this launcher that connected this process to Ray."""

    # --- the cluster --------------------------------------------------------------------------------------------------

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        self.bundles = list(bundles)
        self._join()
        self.group = ray.util.placement_group([bundle.resources for bundle in bundles], "PACK")
        self._wait_for_room()
        # All actors are created before one is asked: they start side by side.
        owned = [bundle for bundle in bundles if bundle.model is not None]
        for bundle in owned:
            self._place(bundle)
        for bundle in owned:
            self._look(bundle)

    def _join(self) -> None:
        """Connect this process to the cluster, or to one of this machine alone that is started for the run."""
        if ray.is_initialized():
            return
        address = self.address or os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {"address": address, "log_to_driver": False}
        if address is None:  # there its cores are numbers that processes take, and engine and trainer share real ones
            wanted = sum(bundle.cpus for bundle in self.bundles) or UNRESERVED
            options |= {"address": "local", "num_cpus": max(cores(), wanted), "include_dashboard": False}
        connect(options, "launcher.address")
        self.joined = True

    def _wait_for_room(self) -> None:
        """Wait until each process has its bundle. Raises ConfigError at the deadline."""
        began, said = time.monotonic(), False
        while not self.group.wait(1.0):
            self._ensure_ranks_live()
            # Its deadline is minutes; a rank that dies meanwhile has ended the run above.
            waited_s = time.monotonic() - began
            asked = in_words(self.bundles)
            free = amounts(ray.available_resources())
            has = f"the cluster has {amounts(ray.cluster_resources())}, of which {free} free"
            if waited_s > self.wait_s:
                raise ConfigError(f"launcher.wait_s={self.wait_s:g} has passed: no room for {asked}; {has}")
            if waited_s > QUIET_S and not said:
                said = True
                print(f"waiting for Ray to place {asked}; {has}", file=sys.stderr, flush=True)

    def _place(self, bundle: Bundle) -> None:
        """Create the actor of a process."""
        options: dict[str, Any] = {"name": bundle.process, "num_cpus": bundle.cpus, "num_gpus": bundle.gpus}
        options["runtime_env"] = {"env_vars": CHILDREN_LIVE}
        options["scheduling_strategy"] = self._place_of(bundle.process)
        deadline = time.monotonic() + ANSWER_S
        while bundle.process not in self.hosts:
            try:
                self.hosts[bundle.process] = ray.remote(Host).options(**options).remote()
            except ray.exceptions.ActorAlreadyExistsError as error:  # one that was just killed, or another run's
                if time.monotonic() > deadline:
                    raise ConfigError(f"launcher: another run of this Ray namespace has {bundle.process!r}") from error
                time.sleep(children.POLL_S)

    def place_of_worker(self, env: str, number: int) -> Any:
        return self._place_of(worker_name(env, number))

    def _place_of(self, process: str) -> PlacementGroupSchedulingStrategy | None:
        """Return where a process goes: to its bundle; None = to any node, where nothing was reserved."""
        if self.group is None:
            return None
        place = [each.process for each in self.bundles].index(process)
        return PlacementGroupSchedulingStrategy(self.group, place)

    def _look(self, bundle: Bundle) -> None:
        """See where a process has been placed. Raises ConfigError where it could not run."""
        host = self.hosts[bundle.process]
        try:
            node: Node = ray.get(host.node.remote(), timeout=ANSWER_S)
            path = bundle.model.path if bundle.model is not None else ""
            has_model = not Path(path).is_dir() or ray.get(host.sees.remote(path))
        except ray.exceptions.RayError as error:
            raise ConfigError(f"launcher: no actor for {bundle.process!r}: {in_one_line(error)[-400:]}") from error
        check_node(bundle, node, ray.util.get_node_ip_address(), has_model=has_model)
        self.nodes[bundle.process] = node

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_engine(self, spec: EngineSpec) -> str:
        self._have(bundle_of(spec))
        self.engines[spec.process] = spec
        return self._serve(spec.process)

    def _have(self, bundle: Bundle) -> None:
        """Place a process for which nothing was reserved, as in an evaluation."""
        if bundle.process not in self.hosts:
            self.bundles.append(bundle)
            self._join()
            self._place(bundle)
            self._look(bundle)

    def _serve(self, name: str) -> str:
        """Have an engine's actor start the engine. Returns its base URL."""
        spec, host = self.engines[name], self.hosts[name]
        with own_errors():
            port = ray.get(host.serve.remote(spec, search_path()))
        self._watch(name, spec.log)
        return base_url(self.nodes[name].address if spec.config.host in EVERY_ADDRESS else spec.config.host, port)

    def restart_engine(self, name: str) -> str | None:
        if name not in self.engines:
            return None
        if self._is_lost(name):  # perhaps with its node: then Ray places its bundle elsewhere
            bundle = next(each for each in self.bundles if each.process == name)
            if self.group is not None:
                self._wait_for_room()
            ray.kill(self.hosts.pop(name))
            self._place(bundle)
            self._look(bundle)
        if not self.engines[name].frozen:
            with own_errors():
                self._fetch_versions(self.hosts[name])
        return self._serve(name)

    def _fetch_versions(self, host: Any) -> None:
        """Have the weights that the first rank has where an engine is to start again."""
        first = next((rank for process, rank in self.hosts.items() if process.startswith(TRAINER)), None)
        if first is None:  # in an evaluation
            return
        for weights in ray.get(first.versions.remote()):
            with contextlib.suppress(FileNotFoundError):  # discarded meanwhile: engines have a newer one
                ray.get(host.fetch.remote(weights, first))

    def _is_lost(self, name: str) -> bool:
        """Return whether an actor is gone, once Ray is sure: it takes some seconds without a heartbeat of the node."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                ray.get(self.hosts[name].node.remote())
                return False
            except ray.exceptions.ActorUnavailableError:
                self._ensure_ranks_live()
                if time.monotonic() > deadline:
                    return True
                time.sleep(children.POLL_S)
            except ray.exceptions.RayActorError:
                return True

    def transport(self, run_dir: Path, weights: Weights) -> FileTransport:
        return FileTransport(run_dir) if weights.needs_shared_folder else RayTransport(run_dir)

    def start_trainer(self, spec: TrainerSpec) -> None:
        for bundle in spec.bundles:
            self._have(bundle)
        names = spec.names
        payload = dict(spec.payload)
        carried = not build(payload["weights"], Weights, "weights").needs_shared_folder
        if not carried:
            self._ensure_seen(spec.run_dir)
        apart = len({self.nodes[name].address for name in names}) > 1
        environment = search_path() | {ADDRESS_VARIABLE: self.nodes[names[0]].address}
        if len(names) > 1:
            port = str(ray.get(self.hosts[names[0]].meeting_port.remote()))
            address = self.nodes[names[0]].address if apart else "127.0.0.1"
            meeting = {"MASTER_ADDR": address, "MASTER_PORT": port}
            environment |= meeting | {"WORLD_SIZE": str(len(names)), "LOCAL_RANK": "0"}
        for rank, name in enumerate(names):
            host = self.hosts[name]
            if carried and payload.get("resume") is not None:
                payload["resume"] = spec.payload["resume"] | {"folder": sent(spec.payload["resume"]["folder"], host)}
            # Ray itself shows each actor its GPUs.
            own = replace(spec, payload=payload, gpus=())
            variables = environment | ({"RANK": str(rank)} if len(names) > 1 else {})
            ray.get(host.train.remote(own, name, variables, os.getcwd(), apart=apart, carried=carried))
            self._watch(name, rank_log(spec.run_dir, rank), spec.run_dir if carried else None)

    def _ensure_seen(self, run_dir: Path) -> None:
        """Raise PrlError where a node does not see the run directory."""
        config = run_dir.resolve() / "config.yaml"
        for name, host in self.hosts.items():
            if not ray.get(host.has.remote(str(config), config.read_bytes())):
                where = self.nodes[name].address
                raise PrlError(f"weights=files: node {where} ({name!r}) sees no {run_dir.resolve()}: weights=ray")

    def _watch(self, name: str, log: Path, run_dir: Path | None = None) -> None:
        self.ends[name] = self.hosts[name].ended.remote(str(log))
        self.relay.follow(name, self.hosts[name], log, run_dir)

    def ensure_alive(self) -> None:
        if self.relay.error is not None:
            raise PrlError(f"files of the trainer do not get here: {in_one_line(self.relay.error)}")
        self._ensure_ranks_live()
        self._ensure_live([name for name in self.ends if not name.startswith(TRAINER)])

    def _ensure_ranks_live(self) -> None:
        """Raise ProcessDied for a rank: nothing mends that, and waiting for a new engine has no use then."""
        # One that loses another ends with an error, perhaps before Ray has missed the other one.
        self._ensure_live([name for name in self.ends if name.startswith(TRAINER)], others_s=2.0)

    def _ensure_live(self, names: Sequence[str], others_s: float = 0.0) -> None:
        if not any(self._deaths(names, 0.0)):
            return
        deaths = self._deaths(names, others_s)
        with contextlib.suppress(ray.exceptions.RayError):
            self.relay.pull()  # the last lines of logs
        # One that a signal ended, or its node's end, is the cause of the others'.
        raise max((death for death in deaths if death is not None), key=lambda pair: pair[0])[1]

    def _deaths(self, names: Sequence[str], wait_s: float) -> list[tuple[int, ProcessDied] | None]:
        """Return what `_death_of` says of those that have ended; all of them may take `wait_s` to."""
        ends = [self.ends[name] for name in names]
        ended = ray.wait(ends, num_returns=len(ends), timeout=wait_s)[0] if ends else []
        return [self._death_of(name) for name in names if self.ends[name] in ended]

    def _death_of(self, name: str) -> tuple[int, ProcessDied] | None:
        """Return the status of a process that has ended, and the error to raise. None where a rank has ended as
        it should."""
        try:
            status, text = ray.get(self.ends[name])
        except ray.exceptions.RayActorError as error:
            self.relay.followed.pop(name, None)  # each call of a lost actor would take its time to fail
            why = in_one_line(error)[:300]
            return LOST, ProcessDied(f"process {name!r} is lost with node {self.nodes[name].address}: {why}", name)
        if status == 0 and name.startswith(TRAINER):
            return None
        return status, ProcessDied(text, name)

    async def finish(self, timeout_s: float) -> None:
        ranks = [name for name in self.ends if name.startswith(TRAINER)]
        for name in self.ends.keys() - set(ranks):  # they end while the trainer writes
            self.hosts[name].ask.remote()
        self.ends = {name: self.ends[name] for name in ranks}
        await self.wait_until(lambda: ready(list(self.ends.values())), timeout_s)
        self.ensure_alive()
        await asyncio.to_thread(self.relay.pull)

    def stop(self) -> None:
        if not ray.is_initialized():
            return
        self.relay.close()
        stopping = [host.stop.remote() for host in self.hosts.values()]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=2 * children.GRACE_S)
        for host in self.hosts.values():
            ray.kill(host)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
        self.hosts, self.ends, self.group = {}, {}, None
        self.relay.followed.clear()
        if self.joined:
            self.joined = False
            gc.collect()  # actors of the next Ray have the same ids: a handle that goes then would end one of those
            ray.shutdown()


def check_node(bundle: Bundle, node: Node, here: str, *, has_model: bool) -> None:
    """Raise ConfigError where a process cannot run on its node, or not be reached there from the address `here`."""
    at, own = f"{bundle.process!r} is placed on node {node.address}", version("prl")
    if node.prl != own:
        raise ConfigError(f"launcher: {at}, which has prl {node.prl}; this machine has {own}")
    if not has_model and bundle.model is not None:
        raise ConfigError(f"model.path={bundle.model.path!r}: {at}, which sees no such folder")
    if bundle.room > node.room:
        need, free = (f"{size / 2**30:.1f} GiB" for size in (bundle.room, node.room))
        raise ConfigError(f"launcher: {at}, where weights need {need} of {node.folder}, and {free} are free")
    if bundle.host in THIS_MACHINE and node.address != here:
        raise ConfigError(f"engine.host={bundle.host}: {at}, and only that machine would reach it: engine.host=0.0.0.0")


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise as a PrlError what an actor's method has raised, in a line."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise PrlError(in_one_line(getattr(error, "cause", None) or error)) from error


def search_path() -> dict[str, str]:
    """Variables by which a process finds the modules that this one does."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))}


def sent(folder: str, host: Any) -> str:
    """Return where an actor's process finds a checkpoint of this machine: in its place, or copied to the
    actor's node."""
    manifest = Path(folder) / MANIFEST  # it has the hashes of all other files
    if ray.get(host.has.remote(str(manifest), manifest.read_bytes())):
        return folder
    for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        path = f"resume/{file.relative_to(folder)}"
        with file.open("rb") as opened:
            while data := opened.read(CHUNK):
                ray.get(host.append.remote(path, data))
    return str(ray.get(host.folder.remote("resume")))
