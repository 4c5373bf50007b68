"""Optional packages that monitors need."""

import importlib.util

from prl.errors import ConfigError


def require(package: str, where: str) -> None:
    """Raise ConfigError naming the extra to install, unless `package` is installed; `where` is what needs it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{where} needs the package {package}, which is not installed: pip install 'prl[{package}]'")
