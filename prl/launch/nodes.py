"""What launchers for several nodes have in common: the first as `local` has it, some processes on the others."""

import contextlib
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge

from prl.config.gpus import HERE, Place
from prl.config.hardware import MachineConfig, assuming
from prl.config.machine import address_of
from prl.config.schema import TrainConfig
from prl.errors import ConfigError
from prl.launch import specs
from prl.launch.launcher import EngineSpec, TrainerSpec
from prl.launch.local import LocalLauncher
from prl.launch.processes import Process
from prl.trainer.config import MEETING_VARIABLE

EVERYWHERE = ("0.0.0.0", "::")
OPENED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface where processes of several nodes find each other; else it is loopback."""


@dataclass(kw_only=True)
class NodesLauncher(LocalLauncher):
    """A run on several nodes, the first of which is this machine (`config/gpus.py` says who is where)."""

    FOLDER: ClassVar[str]
    """Folder of a run directory for what the launcher leaves there, and for the file at which ranks meet."""

    nodes: Annotated[int, Ge(1)] = 1
    """Nodes. The orchestrator is on the first, engines are from there on, ranks of the trainer on all."""
    gpus_per_node: Annotated[int, Ge(0)] = 0
    """GPUs on each node; 0 = none."""
    interface: str | None = None
    """Network interface on which the ranks of several nodes, and engines to which weights are sent, connect to each
    other, without a token: eth0, ib0."""
    assumed: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False)
    """What is taken for the machine's: what a node has."""
    met: list[Path] = field(default_factory=list, init=False, repr=False)
    """The file at which ranks of several nodes meet."""

    def check(self, where: str) -> None:
        check_word(self.interface, f"{where}.interface")

    def __enter__(self) -> "NodesLauncher":
        self.assumed.enter_context(assuming(self.machine()))
        return self

    def machine(self) -> MachineConfig:
        """A node, as far as the config says: what is to be taken for the machine's."""
        return MachineConfig(gpus=self.gpus_per_node)

    def __exit__(self, *error: object) -> None:
        self.assumed.close()
        super().__exit__(*error)

    # --- what a launcher does for nodes other than the first ---

    @abstractmethod
    def address(self, node: int) -> str:
        """Where the engines of a node are reached, which is not the first."""

    @abstractmethod
    def elsewhere(self, place: Place, name: str, command: list[str], env: dict[str, str], log: Path) -> Process:
        """Start a process on another node than the first."""

    # --- processes ---

    def reached_at(self, ranks: Sequence[Place]) -> str:
        if not any(place.node for place in ranks) or self.interface is None:
            return super().reached_at(ranks)
        return address_of(self.interface.partition(",")[0])

    def start(self, name: str, command: list[str], *, env: dict[str, str], log: Path, place: Place = HERE) -> Process:
        env = env | self.opened
        if place.node == 0:
            return super().start(name, command, env=env, log=log, place=place)
        self.processes.append(process := self.elsewhere(place, name, command, env, log))
        return process

    def stand_by(self, name: str, command: list[str], *, env: dict[str, str], place: Place = HERE) -> None:
        if place.node == 0:  # on another it imports once it is started
            super().stand_by(name, command, env=env | self.opened, place=place)

    @property
    def opened(self) -> dict[str, str]:
        """What names the network interface to processes, where there are several nodes."""
        return dict.fromkeys(OPENED, self.interface) if self.interface and self.nodes > 1 else {}

    def start_engine(self, spec: EngineSpec) -> str:
        url = super().start_engine(spec)
        return f"http://{self.address(spec.place.node)}:{self.engines[spec.process][1]}" if spec.place.node else url

    def start_trainer(self, spec: TrainerSpec) -> None:
        if len({place.node for place in spec.places}) > 1:
            (spec.run_dir / self.FOLDER).mkdir(mode=0o700, exist_ok=True)
        super().start_trainer(spec)

    def _ranks(self, spec: TrainerSpec) -> dict[str, dict[str, str]]:
        found = super()._ranks(spec)
        if len({place.node for place in spec.places}) < 2:
            return found
        # A file, not a TCP store: that would listen on every interface of the first node and ask nobody who it is.
        # Batches and weights need a folder that all nodes see anyway; this one is for the user alone.
        self.met = self.met or [spec.run_dir.resolve() / self.FOLDER / f"ranks-{secrets.token_hex(4)}"]
        return {name: env | {MEETING_VARIABLE: str(self.met[0])} for name, env in found.items()}

    def stop(self) -> None:
        super().stop()
        for path in self.met:
            path.unlink(missing_ok=True)


def check_places(config: TrainConfig, launcher: NodesLauncher) -> None:
    """Raise ConfigError where the nodes do not suit the run's processes."""
    found, nodes = specs.placement(config), launcher.nodes
    for key, inference, places in (
        ("inference", config.inference, found.engines),
        ("teacher.inference", config.teacher.inference, found.teachers),
    ):
        far = max((place.node for place in places), default=0)
        if far and inference.host not in EVERYWHERE:
            raise ConfigError(
                f"{key}.host={inference.host}: a server comes to node {far + 1}, where the orchestrator does not reach "
                f"that: write {key}.host=0.0.0.0, and it listens at every address of its node, where the run's token "
                "guards it"
            )
    of_ranks = {place.node for place in found.ranks}
    if len(of_ranks) > 1 and launcher.interface is None:
        raise ConfigError(
            f"launcher.nodes={nodes}: the trainer's ranks are on {len(of_ranks)} nodes, and what they send each other "
            "has no token: name the network interface that they may use, launcher.interface=<name> (ip -br address "
            "lists them)"
        )
    used = {0, *of_ranks, *(place.node for place in (*found.engines, *found.teachers))}
    if idle := sorted(set(range(nodes)) - used):
        raise ConfigError(
            f"launcher.nodes={nodes}: node {idle[0] + 1} would have nothing to do. Raise trainer.num_processes, now "
            f"{len(found.ranks)}, or ask for {len(used)}"
        )


def check_word(value: str | None, where: str) -> None:
    """Raise ConfigError for what is no one word of a command."""
    if value is not None and (not value or not value.isprintable() or set(value) & set(" \"'\\")):
        raise ConfigError(f"{where}={value[:80]!r} must be one word, without quotes")
