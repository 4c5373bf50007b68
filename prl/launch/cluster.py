"""The connection to a Ray cluster, or to a Ray that is started on this machine."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from prl.errors import ConfigError
from prl.monitors.text import in_one_line

CONNECT_S = 5.0
"""[s] Deadline for a cluster to take a connection: Ray itself would try for minutes."""
LAST_LINES_S = 1.0
"""[s] Time for what processes on the cluster have printed last to get here."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}


def connect(options: dict[str, Any], where: str) -> Callable[[], None]:
    """Connect this process to Ray by `ray.init(**options)`. Returns what disconnects it.

    Raises ConfigError, which names the setting `where`, if Ray is not installed, or none answers.
    """
    os.environ |= QUIET
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"{where} needs Ray: pip install 'prl[ray]'") from None
    address = options.get("address") or os.environ.get("RAY_ADDRESS", "")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if ":" in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{where}: no Ray at {address or 'this machine'}: {in_one_line(error)}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own

    def disconnect() -> None:
        time.sleep(LAST_LINES_S)
        ray.shutdown()

    return disconnect
