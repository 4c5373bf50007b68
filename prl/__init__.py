"""prl: asynchronous reinforcement learning and distillation of language models."""

# verifiers looks harnesses up by the name of a top-level module and its `__all__`: `harness: {id: prl}` is ours.
__all__ = ["ChatHarness"]


def __getattr__(name: str):
    if name == "ChatHarness":
        from prl.envs.harness import ChatHarness

        return ChatHarness
    if name == "__version__":
        from importlib.metadata import version

        return version("prl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
