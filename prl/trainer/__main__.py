"""The trainer process, one per rank: `python -m prl.trainer RUN_DIR` with the config as JSON in `PRL_CONFIG`."""

from prl.trainer.worker import main

if __name__ == "__main__":
    main()
