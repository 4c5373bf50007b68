"""Patches of vLLM that make a step on a CPU cheaper; each says which change of vLLM would remove it.

Off where a GPU computes. Imports vLLM and nothing of the rest.
"""

PATCHES_VARIABLE = "PRL_CPU_PATCHES"
"""Environment variable of a server; set to anything, it applies them."""


def install() -> None:
    """Apply all of them, before vLLM starts its engine core."""
    from prl.engines.vllm.cpu import adapters, fork, passes, prefixes, replies

    prefixes.run_prefixes_once()
    passes.normalise_in_one_kernel()
    passes.draw_noise_once()
    replies.reply_once()
    adapters.read_each_once()
    fork.fork_engine()
