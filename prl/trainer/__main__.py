"""The trainer process, one per rank: `python -m prl.trainer RUN_DIR` with the config as JSON in `PRL_CONFIG`."""

import os

from prl import lazy_compiler, standby, transformers_start


def import_ahead() -> None:
    """Import what loading and training any model needs, before it is known which one."""
    lazy_compiler.install()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        transformers_start.without_sharding()
    from transformers import modeling_utils  # noqa: F401

    from prl.trainer import worker  # noqa: F401


if __name__ == "__main__":
    with standby.importing():
        import_ahead()
    standby.wait()
    from prl.trainer import worker

    worker.main()
