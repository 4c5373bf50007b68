"""How the C library keeps the memory of this process."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
OWN_PAGES = 2 << 20
"""Blocks of so many bytes get pages of their own, which go back to the system when they are freed."""
KEPT = 32 << 20
"""Freed bytes that the heap of smaller blocks keeps at its end, for the next step."""


def give_back_large_blocks() -> None:
    """Have glibc give large freed blocks back to the system; without glibc, do nothing.

    By itself it soon takes blocks of up to 32 MiB, such as activations, from one heap. There they leave holes between
    those that live longer, and after a step most of it is held still.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
        mallopt(M_TRIM_THRESHOLD, KEPT)
