"""The trainer process, one per rank: `python -m prl.trainer RUN_DIR` with the config as JSON in `PRL_CONFIG`."""

import json
import os
import sys
from pathlib import Path

from prl.errors import PrlError
from prl.trainer.worker import run


def main() -> None:
    """Run one rank; an error meant for the user is printed without a traceback."""
    try:
        run(json.loads(os.environ["PRL_CONFIG"]), Path(sys.argv[1]))
    except (PrlError, ValueError) as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
