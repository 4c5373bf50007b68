"""prl: asynchronous reinforcement learning and distillation of language models."""

import os
import sys

from prl import lazy_imports, transformers_start

if os.path.basename((sys.argv or [""])[0]) in ("-m", "prl"):  # a command: Ctrl-C may come while it imports

    def _stopped(kind, error, trace):
        """Say what is unhandled; of Ctrl-C what `prl.command` says."""
        if kind is not KeyboardInterrupt:
            return sys.__excepthook__(kind, error, trace)
        print("stopped", file=sys.stderr, flush=True)
        os._exit(130)

    sys.excepthook = _stopped

lazy_imports.install()  # before anybody imports verifiers, vLLM or transformers
transformers_start.install()

# verifiers looks harnesses up by the name of a top-level module and its `__all__`: `harness: {id: prl}` is ours.
__all__ = ["ChatHarness"]


def __getattr__(name: str):
    if name == "ChatHarness":
        from prl.episodes.harness import ChatHarness

        return ChatHarness
    if name == "__version__":
        from importlib.metadata import version

        return version("prl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
