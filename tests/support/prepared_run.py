"""A run that is prepared as `python -m prl.train` does it, and not started."""

from prl.launch.builder import PreparedRun, prepare
from prl.launch.components import build_components


def prepared_run(config) -> PreparedRun:
    return prepare(config, build_components(config))
