"""Patches of vLLM for an engine on a CPU (`inference.cpu_patches`).

Each module is one, and says what it buys and which change of vLLM's would remove it. Start at `install`.
"""

PATCHES_VARIABLE = "PRL_CPU_PATCHES"
"""Environment variable of a server; set to anything, it applies them."""


def install() -> None:
    """Apply all of them, before vLLM starts its engine core."""
    from prl.inference.cpu import fork, passes, prefixes, replies

    prefixes.run_prefixes_once()
    passes.normalise_in_one_kernel()
    passes.draw_noise_once()
    replies.reply_once()
    fork.fork_engine()
