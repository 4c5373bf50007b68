"""Weights over the nodes of a Ray cluster, which need no folder in common.

The trainer's first rank writes a folder into the memory of its node. It goes from there to each node that has an
engine, once, and engines load it from files in memory.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from prl.base.files import step_name
from prl.weights.files import FileWeights

if TYPE_CHECKING:
    from prl.engines.client import PolicyPool


@dataclass(kw_only=True, eq=False)
class RayWeights(FileWeights):
    """The trainer writes a folder for each version into memory, which each node with an engine gets a copy of."""

    needs_shared_folder: ClassVar[bool] = False
    needs_ray: ClassVar[bool] = True
    nodes: dict[Any, str] = field(default_factory=dict, init=False, repr=False)
    """Ids of their nodes, by actor."""

    async def load(self, engine: "PolicyPool", version: int, timeout_s: float) -> None:
        await asyncio.to_thread(self._distribute, step_name(version))
        # A path in the folder where each engine's actor has started it.
        await engine.update_weights(version, step_name(version), timeout_s)

    def _distribute(self, version: str) -> None:
        """Have each engine's actor get the weights: from its own node, where that has them, else over the net.

        An actor that is lost is left out: its engine gets them when it is started again.
        """
        import ray  # the trainer and a dry run do without
        import ray.exceptions

        from prl.transport.events import ENGINE, TRAINER
        from prl.transport.ray import hosts

        source = hosts(TRAINER)[0]
        holders: dict[str, tuple[Any, Any]] = {}
        copies = []
        for host in [source, *hosts(ENGINE)]:
            with contextlib.suppress(ray.exceptions.RayActorError):
                if host not in self.nodes:
                    self.nodes[host] = ray.get(host.node.remote()).id
                holder, arrived = holders.get(self.nodes[host], (source, None))
                if host != source:
                    arrived = host.fetch.remote(version, holder, arrived)
                    copies.append(arrived)
                holders.setdefault(self.nodes[host], (host, arrived))
        for copy in copies:
            with contextlib.suppress(ray.exceptions.RayActorError):
                ray.get(copy)
