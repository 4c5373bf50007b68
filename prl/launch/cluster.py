"""The connection to a Ray cluster, or to a Ray of this machine alone. Imports Ray only where it is asked for."""

import logging
import os
import signal
import socket
import threading
from typing import Any

from prl.base.errors import ConfigError
from prl.base.text import in_one_line

CONNECT_S = 10.0
"""[s] Deadline for a cluster to take a connection: Ray itself would try for minutes."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}


def connect(options: dict[str, Any], where: str) -> None:
    """Connect this process to Ray by `ray.init(**options)`.

    Raises ConfigError, which names the setting `where`, if Ray is not installed, or none answers.
    """
    os.environ |= QUIET
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError:
        raise ConfigError(f"{where} needs Ray: pip install 'prl[ray]'") from None
    address = options.get("address") or os.environ.get("RAY_ADDRESS", "")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if ":" in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        why = str(error.__cause__ or error).strip().rpartition("\n")[2]  # below a traceback of Ray's own
        raise ConfigError(f"{where}: no Ray at {address or 'this machine'}: {in_one_line(why)[:600]}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has set its own
