"""The trainer process, one per rank: `python -m prl.trainer RUN_DIR` with the config as JSON on stdin."""

from prl.base import garbage

if __name__ == "__main__":
    with garbage.loading():
        from prl.trainer.worker import main

    garbage.skip_last()
    main()
