"""The trainer process, one per rank: `python -m prl.trainer RUN_DIR` with the config as JSON in `PRL_CONFIG`."""

from prl import standby
from prl.reaper import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # at once: what follows imports torch for seconds
    with standby.importing():
        from prl.trainer import worker

        worker.import_ahead()
    standby.wait()
    worker.main()
