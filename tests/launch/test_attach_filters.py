"""The longest completion that filters are told of."""

from types import SimpleNamespace

import pytest

from prl.launch.components import attach_filters, longest_completion


@pytest.mark.parametrize(("asked", "of_taskset", "longest"), [(None, 64, 64), (200, 64, 200), (None, None, 1023)])
def test_the_cap_that_is_in_force_is_the_longest_completion(asked, of_taskset, longest):
    env = SimpleNamespace(sampler=SimpleNamespace(max_tokens=asked))
    environment = SimpleNamespace(verifiers_env=None, taskset=SimpleNamespace(MAX_TOKENS=of_taskset))
    assert longest_completion(env, environment, 1024) == longest
    several_turns = SimpleNamespace(verifiers_env=object(), taskset=environment.taskset)
    assert longest_completion(env, several_turns, 1024) == 1023


def test_each_filter_is_told_the_sizes():
    told = []
    each = SimpleNamespace(attach=lambda **sizes: told.append(sizes))
    attach_filters({"pre_batch": {"a": each}, "post_batch": {"b": each}}, "filters", vocab_size=10, longest=7)
    assert told == [{"vocab_size": 10, "longest": 7}] * 2
