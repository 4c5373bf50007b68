"""Groups that one process sends tensors to."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from prl.transport import gloo


def test_who_does_not_know_the_secret_is_no_member():
    listener = gloo.listening("127.0.0.1")
    address, port = listener.getsockname()
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(gloo.join, address, port, "guessed", 1, 2, 1.0)
        with pytest.raises(RuntimeError, match="has not come"):
            gloo.gather(listener, "known", 2, 1.0, lambda: False)
        with pytest.raises(RuntimeError):
            stranger.result(timeout=10)
