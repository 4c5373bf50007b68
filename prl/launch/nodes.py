"""What launchers for several nodes have in common: the first as `local` has it, some processes on the others."""

import contextlib
import os
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from prl.config.hardware import MachineConfig, assuming
from prl.config.validate import resolve_device
from prl.errors import ConfigError
from prl.launch import specs
from prl.launch.launcher import EngineSpec, TrainerSpec
from prl.launch.local import LOOPBACK, LocalLauncher
from prl.launch.placement import Place, Placement, check_used, placed, visible_devices
from prl.launch.processes import Process
from prl.trainer.config import MEETING_VARIABLE

if TYPE_CHECKING:
    from prl.launch.builder import PreparedRun

EVERYWHERE = ("0.0.0.0", "::")
OPENED = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
"""Variables of `LOOPBACK` that name the interface where ranks of several nodes find each other."""


@dataclass(kw_only=True)
class NodesLauncher(LocalLauncher):
    """A run on several nodes, the first of which is this machine (`placement.py` says who is where)."""

    FOLDER: ClassVar[str]
    """Folder of a run directory for what the launcher leaves there, and for the file at which ranks meet."""

    nodes: Annotated[int, Ge(1)] = 1
    """Nodes. The orchestrator is on the first, engines are from there on, ranks of the trainer on all."""
    gpus_per_node: Annotated[int, Ge(0)] = 0
    """GPUs on each node; 0 = none."""
    interface: str | None = None
    """Network interface on which the ranks of several nodes connect to each other, without a token: eth0, ib0."""
    engine_gpus: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """GPUs that each engine spans, by process."""
    ranks: int = field(default=0, init=False, repr=False)
    """Of the trainer."""
    assumed: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False)
    """What is taken for the machine's: the GPUs of all nodes."""
    met: list[Path] = field(default_factory=list, init=False, repr=False)
    """The file at which ranks of several nodes meet."""

    def check(self, where: str) -> None:
        check_word(self.interface, f"{where}.interface")

    def __enter__(self) -> "NodesLauncher":
        self.assumed.enter_context(assuming(self.machine()))
        return self

    def machine(self) -> MachineConfig:
        """What is to be taken for the machine's."""
        return MachineConfig(gpus=self.nodes * self.gpus_per_node)

    def __exit__(self, *error: object) -> None:
        self.assumed.close()
        super().__exit__(*error)

    # --- what a launcher does for nodes other than the first ---

    def count(self) -> int:
        """Nodes that there are."""
        return self.nodes

    @abstractmethod
    def address(self, node: int) -> str:
        """Where the engines of a node are reached, which is not the first."""

    @abstractmethod
    def elsewhere(self, place: Place, name: str, command: list[str], env: dict[str, str], log: Path) -> Process:
        """Start a process on another node than the first."""

    # --- where processes run ---

    def plan(self, engines: Sequence[EngineSpec], trainer: TrainerSpec | None) -> Placement:
        """Take further engines and the trainer into account; return where all of them are. Raises ConfigError."""
        self.engine_gpus |= {
            each.process: each.config.tensor_parallel_size if each.device == "cuda" else 0 for each in engines
        }
        self.ranks = self.ranks if trainer is None else trainer.num_processes
        nodes = self.count()
        found = placed(nodes, self.gpus_per_node, list(self.engine_gpus.values()), self.ranks)
        for spec in engines:
            node = found.engines[list(self.engine_gpus).index(spec.process)].node
            if node and spec.config.host not in EVERYWHERE:
                key = "teacher.inference.host" if spec.frozen else "inference.host"
                raise ConfigError(
                    f"{key}={spec.config.host}: engine {spec.process!r} comes to node {node + 1}, where the "
                    f"orchestrator does not reach that: write {key}=0.0.0.0, and it listens at every address of its "
                    "node, where the run's token guards it"
                )
        if found.rank_nodes > 1 and self.interface is None:
            raise ConfigError(
                f"launcher.nodes={nodes}: the trainer's ranks are on {found.rank_nodes} nodes, and what they send each "
                "other has no token: name the network interface that they may use, launcher.interface=<name> "
                "(ip -br address lists them)"
            )
        return found

    def place(self, name: str) -> Place:
        """Where a process of the run is, by its name; the first node for what is not placed."""
        found = self.plan([], None)
        if name in self.engine_gpus:
            return found.engines[list(self.engine_gpus).index(name)]
        role, _, rank = name.partition(" rank ")
        return found.ranks[int(rank or 0)] if role == "trainer" and found.ranks else Place(0)

    def import_ahead(self, engines: Sequence[EngineSpec], trainer: TrainerSpec | None) -> None:
        self.plan(engines, trainer)
        super().import_ahead([replace(each, gpus=()) for each in engines], trainer and replace(trainer, gpus=()))

    # --- processes ---

    def start(self, name: str, command: list[str], *, env: dict[str, str], log: Path) -> Process:
        place = self.place(name)
        if place.node == 0:
            return super().start(name, command, env=env | shown(place.gpus), log=log)
        self.processes.append(process := self.elsewhere(place, name, command, env, log))
        return process

    def stand_by(self, name: str, command: list[str], *, env: dict[str, str]) -> None:
        place = self.place(name)
        if place.node == 0:  # on another it imports once it is started
            super().stand_by(name, command, env=env | shown(place.gpus))

    def start_engine(self, spec: EngineSpec) -> str:
        node = self.plan([spec], None).engines[list(self.engine_gpus).index(spec.process)].node
        url = super().start_engine(replace(spec, gpus=()))  # which it sees, `start` says
        return f"http://{self.address(node)}:{self.engines[spec.process][1]}" if node else url

    def start_trainer(self, spec: TrainerSpec) -> None:
        if self.plan([], spec).rank_nodes > 1:
            (spec.run_dir / self.FOLDER).mkdir(mode=0o700, exist_ok=True)
        super().start_trainer(replace(spec, gpus=()))

    def _ranks(self, spec: TrainerSpec) -> dict[str, dict[str, str]]:
        found, places = super()._ranks(spec), self.plan([], spec)
        if places.rank_nodes > 1:
            # A file, not a TCP store: that would listen on every interface of the first node and ask nobody who it is.
            # Batches and weights need a folder that all nodes see anyway; this one is for the user alone.
            self.met = self.met or [spec.run_dir.resolve() / self.FOLDER / f"ranks-{secrets.token_hex(4)}"]
            opened = {name: str(self.interface) if name in OPENED else value for name, value in LOOPBACK.items()}
            found = {name: env | opened | {MEETING_VARIABLE: str(self.met[0])} for name, env in found.items()}
        # A rank that has GPUs sees no others.
        return {
            name: env | ({"LOCAL_RANK": "0"} if place.gpus else {})
            for (name, env), place in zip(found.items(), places.ranks, strict=True)
        }

    def stop(self) -> None:
        super().stop()
        for path in self.met:
            path.unlink(missing_ok=True)


def check_places(prepared: "PreparedRun", launcher: NodesLauncher) -> None:
    """Raise ConfigError where the nodes do not suit the run's processes, a hosted teacher among them."""
    config, run_dir = prepared.config, Path(prepared.config.run.dir)
    log = specs.engine_log(run_dir)
    engines = specs.policy_engines(config, config.model, prepared.token, log)
    if prepared.components.hosted:
        hosting, policy = config.teacher.inference, specs.policy_engine(config, config.model, prepared.token, log)
        teacher = replace(policy, process="teacher", config=hosting, device=resolve_device(hosting.device), frozen=True)
        engines += specs.several(teacher, specs.placement(config).teachers)
    nodes = min(launcher.nodes, launcher.count())  # of a job that somebody has made himself, those that it has
    check_used(launcher.plan(engines, specs.trainer(config, run_dir)), nodes)


def shown(gpus: Sequence[int]) -> dict[str, str]:
    """Environment of a process on this machine that is to see these of its GPUs."""
    return {"CUDA_VISIBLE_DEVICES": visible_devices(gpus, os.environ)} if gpus else {}


def check_word(value: str | None, where: str) -> None:
    """Raise ConfigError for what is no one word of a command."""
    if value is not None and (not value or not value.isprintable() or set(value) & set(" \"'\\")):
        raise ConfigError(f"{where}={value[:80]!r} must be one word, without quotes")
