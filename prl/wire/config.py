"""Config nodes of the transports. A config is composed with these classes, without the modules that they name."""

from dataclasses import dataclass


@dataclass
class FileTransportConfig:
    """Messages as files in the run directory, which launcher and trainer must both be able to read and write."""

    _target_: str = "prl.wire.files.FileTransport"
