"""Watch runs in a browser while they train.

    python -m prl.tools.watch                              all runs below outputs/, those to come too
    python -m prl.tools.watch <run, sweep or folder> …     these, or the runs below them

Prints the address, which has a token in it: nobody else on this machine can open the page. Ctrl-C ends it.
"""

import argparse
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from prl.base.errors import ConfigError
from prl.tools import OUTPUTS, named, run_command

TOKEN_VARIABLE = "PRL_WATCH_TOKEN"


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    summary, *_ = str(__doc__).splitlines()
    same = f"With --port and a token of your own in {TOKEN_VARIABLE} the address stays the same."
    parser = argparse.ArgumentParser(prog="prl watch", description=summary, epilog=same)
    what = "a run directory, or a folder of some; or its name under outputs/. By default outputs/"
    parser.add_argument("dirs", nargs="*", type=Path, default=[OUTPUTS], metavar="dir", help=what)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of the address; by default one that is free")
    try:
        return run_command(watch, parser, argv)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        return 130


def watch(args: argparse.Namespace) -> None:
    """Serve the page until stopped. Raises ConfigError for a folder that is not there, or a port that cannot be had."""
    folders = [named(path) for path in args.dirs]
    missing = [str(folder) for folder in folders if not folder.is_dir() and folder != OUTPUTS]
    if missing:
        raise ConfigError(f"there is no folder {', '.join(missing)}; without arguments all of {OUTPUTS}/ is watched")
    try:
        listening = socket.create_server(("127.0.0.1", args.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {args.port}: {error}") from error
    import uvicorn  # once the arguments have passed, since it and pandas take their time

    from prl.tools.watch.server import Site

    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(18)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
    print(f"{', '.join(map(str, folders))} is at {address} until Ctrl-C", flush=True)
    app = Site([folder.absolute() for folder in folders], token).app()
    # A log of requests would have the token.
    quiet: dict[str, Any] = {"log_level": "critical", "access_log": False, "lifespan": "off"}
    uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **quiet)).run([listening])


if __name__ == "__main__":
    sys.exit(main())
