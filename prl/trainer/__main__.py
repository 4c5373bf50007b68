"""The trainer process, one per rank: `python -m prl.trainer RUN_DIR` with the config as a line of JSON on stdin."""

import gc

from prl.base import garbage

if __name__ == "__main__":
    with garbage.loading():
        from prl.trainer.worker import main

    gc.freeze()  # collections of later need not look at modules
    garbage.skip_last()
    main()
