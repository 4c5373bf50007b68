"""Watch runs in a browser while they train.

    python -m prl.tools.watch                              all runs below outputs/, those to come too
    python -m prl.tools.watch <run, sweep or folder> …     these, or the runs below them

Prints the address, which has a token in it: nobody else on this machine can open the page. Ctrl-C ends it.
"""

import argparse
import os
import re
import secrets
import socket
import sys
from pathlib import Path

from prl.base.errors import ConfigError
from prl.tools import OUTPUTS, named, run_command

PORT = 8765
TOKEN_VARIABLE = "PRL_WATCH_TOKEN"


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    summary, *_ = str(__doc__).splitlines()
    parser = argparse.ArgumentParser(
        prog="prl watch",
        description=summary,
        epilog=f"The address stays the same with a token of your own: {TOKEN_VARIABLE}, at least 16 letters or digits.",
    )
    parser.add_argument(
        "dirs",
        nargs="*",
        type=Path,
        default=[OUTPUTS],
        metavar="dir",
        help="a run directory, or a folder of some; or its name under outputs/. By default outputs/",
    )
    parser.add_argument("--port", type=int, metavar="N", help=f"of the address; by default {PORT}, or one that is free")
    try:
        return run_command(watch, parser, argv)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        return 130


def watch(args: argparse.Namespace) -> None:
    """Serve the page until stopped. Raises ConfigError for a folder that is not there, and for a port that is taken."""
    folders = [named(path) for path in args.dirs]
    missing = [str(folder) for folder in folders if not folder.is_dir() and folder != OUTPUTS]
    if missing:
        raise ConfigError(f"there is no folder {', '.join(missing)}; without arguments all of {OUTPUTS}/ is watched")
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(18)
    if not re.fullmatch(r"[\w-]{16,}", token, re.ASCII):
        raise ConfigError(f"a token in {TOKEN_VARIABLE} has at least 16 letters, digits, _ or -")
    listening = bound(args.port)
    import uvicorn

    from prl.tools.watch.listing import Listing
    from prl.tools.watch.server import Site

    address = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
    print(f"{', '.join(map(str, folders))} is at {address} until Ctrl-C", flush=True)
    # Its log of requests would have the token.
    config = uvicorn.Config(
        Site(Listing(folders), token).app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run([listening])


def bound(port: int | None) -> socket.socket:
    """A socket of this machine alone. Raises ConfigError where the port that was asked for is taken."""
    try:
        return socket.create_server(("127.0.0.1", PORT if port is None else port))
    except (OSError, OverflowError) as error:
        if port is None:
            return socket.create_server(("127.0.0.1", 0))
        raise ConfigError(f"--port {port}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
