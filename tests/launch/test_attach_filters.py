"""The longest completion that a filter is told of."""

from types import SimpleNamespace

import pytest

from prl.launch.components import attach_filters


@pytest.mark.parametrize(("asked", "of_taskset", "longest"), [(None, 64, 64), (200, 64, 200), (None, None, 1023)])
def test_a_filter_is_told_the_cap_that_is_in_force(asked, of_taskset, longest):
    told = []
    each = SimpleNamespace(attach=lambda **sizes: told.append(sizes))
    env = SimpleNamespace(sampler=SimpleNamespace(max_tokens=asked), filters={"pre": {"a": each}})
    config = SimpleNamespace(model=SimpleNamespace(max_model_len=1024), node_of=lambda *_: ("filters", None))
    environment = SimpleNamespace(verifiers_env=None, taskset=SimpleNamespace(MAX_TOKENS=of_taskset))
    attach_filters(config, "e", env, environment, vocab_size=10)
    assert told == [{"vocab_size": 10, "longest": longest}]
