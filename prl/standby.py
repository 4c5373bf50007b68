"""A process on standby: started early, it imports what it needs, and begins when its launcher orders it to.

Importing torch, transformers and vLLM takes seconds of which none depends on the config. The launcher starts such a
process with `PRL_STANDBY` in its environment: the path of a file that it writes once the process is to begin. The
process ends with its launcher, as every process of a run does: the wait needs no deadline of its own.
Standard library only.
"""

import atexit
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "PRL_STANDBY"
POLL_S = 0.005


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Have the block import without Python's collector of cycles, which then leaves alone what is there.

    It would look again and again through millions of objects that all stay: a fifth of the time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries written in C report at the end what has not been taken apart
        gc.enable()


def wait() -> None:
    """In a process on standby, wait for the order, then take the log and the environment that it names.

    In any other process do nothing. Raises OSError where the log cannot be written.
    """
    path = os.environ.pop(VARIABLE, None)
    if path is None:
        return
    order = Path(path)
    while not order.exists():
        time.sleep(POLL_S)
    found = json.loads(order.read_text(encoding="utf-8"))
    os.environ |= found["env"]
    sys.stdout.flush()
    sys.stderr.flush()
    with open(found["log"], "ab") as log:
        log.write(Path(found["said"]).read_bytes())
        log.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    order.unlink()


def give_order(order: Path, *, env: Mapping[str, str], log: Path, said: Path) -> None:
    """Have a process on standby begin.

    Args:
        order: The file that it waits for.
        env: What is added to its environment.
        log: Where its output goes from now on, after what it has said so far.
        said: Where its output went before.
    """
    draft = order.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps({"env": dict(env), "log": str(log), "said": str(said)}), encoding="utf-8")
    draft.rename(order)
