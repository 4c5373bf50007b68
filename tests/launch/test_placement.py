"""Which node and which GPUs each process of a job gets."""

import itertools

import pytest

from prl.errors import ConfigError
from prl.launch.placement import Place, check_used, placed, visible_devices


@pytest.mark.parametrize(
    ("nodes", "gpus", "engines", "ranks", "expected"),
    [
        (1, 0, [0], 2, ([(0,)], [(0,), (0,)])),
        (2, 0, [0], 2, ([(0,)], [(0,), (1,)])),
        (2, 0, [0, 0, 0], 3, ([(0,), (1,), (0,)], [(0,), (0,), (1,)])),  # engines take turns
        (1, 1, [1], 1, ([(0, 0)], [(0, 0)])),  # both share the only GPU
        (1, 4, [1], 3, ([(0, 0)], [(0, 1), (0, 2), (0, 3)])),
        (1, 4, [2], 4, ([(0, 0, 1)], [(0, 0), (0, 1), (0, 2), (0, 3)])),
        (2, 2, [1, 1], 2, ([(0, 0), (0, 1)], [(1, 0), (1, 1)])),
        (2, 1, [1, 1], 2, ([(0, 0), (1, 0)], [(0, 0), (1, 0)])),
        (2, 3, [2, 2], 2, ([(0, 0, 1), (1, 0, 1)], [(0, 2), (1, 2)])),  # an engine is on one node
        (1, 2, [0], 2, ([(0,)], [(0, 0), (0, 1)])),  # an engine on the CPU takes none
        (2, 2, [], 4, ([], [(0, 0), (0, 1), (1, 0), (1, 1)])),
        (2, 2, [1], 0, ([(0, 0)], [])),
    ],
)
def test_places(nodes, gpus, engines, ranks, expected):
    found = placed(nodes, gpus, engines, ranks)
    assert found == tuple([Place(node, tuple(own)) for node, *own in places] for places in expected)


def test_what_holds_of_every_placement():
    """No two ranks and no two engines share a GPU; a rank shares one with an engine only where none is free."""
    for nodes, gpus, ranks in itertools.product(range(1, 4), range(1, 5), range(1, 13)):
        for engines in [*itertools.product((1, 2), repeat=2), (1,), (2,), (4,), (1, 1, 1)]:
            try:
                found = placed(nodes, gpus, engines, ranks)
            except ConfigError:
                continue
            of_engines = [(place.node, gpu) for place in found.engines for gpu in place.gpus]
            of_ranks = [(place.node, gpu) for place in found.ranks for gpu in place.gpus]
            assert len(of_engines) == len(set(of_engines)) == sum(engines)
            assert len(of_ranks) == len(set(of_ranks)) == ranks and of_ranks == sorted(of_ranks)
            assert all(0 <= node < nodes and 0 <= gpu < gpus for node, gpu in of_engines + of_ranks)
            shared = set(of_engines) & set(of_ranks)
            assert len(shared) == max(0, ranks + sum(engines) - nodes * gpus)
            assert placed(nodes, gpus, engines[:1], ranks).engines == found.engines[:1], "whatever comes after it"


@pytest.mark.parametrize(("nodes", "ranks"), itertools.product(range(1, 5), range(1, 10)))
def test_ranks_without_gpus_are_in_blocks_of_nearly_equal_size(nodes, ranks):
    of = [place.node for place in placed(nodes, 0, [0], ranks).ranks]
    counts = [of.count(node) for node in range(nodes)]
    assert of == sorted(of) and max(counts) - min(counts) <= 1 and of[0] == 0


@pytest.mark.parametrize(
    ("nodes", "gpus", "engines", "ranks", "says"),
    [
        (1, 2, [4], 1, "spans 4 GPUs .* launcher.gpus_per_node=2: an engine is on one node"),
        (1, 0, [1], 1, "spans 1 GPUs .* launcher.gpus_per_node=0"),
        (1, 2, [1, 1, 1], 1, "the 3 engines take 3 GPUs"),
        (2, 3, [2, 2, 2], 1, "the 3 engines take 8 GPUs"),  # with those that are left over on each node
        (2, 2, [1], 5, "trainer.num_processes=5: launcher.nodes=2 .* makes 4 GPUs"),
    ],
)
def test_what_has_no_place(nodes, gpus, engines, ranks, says):
    with pytest.raises(ConfigError, match=says):
        placed(nodes, gpus, engines, ranks)


def test_a_node_without_work_is_refused():
    check_used(placed(3, 0, [0], 3), 3)
    check_used(placed(3, 1, [1, 1], 1), 3)
    with pytest.raises(ConfigError, match=r"launcher.nodes=3: node 3 .* trainer.num_processes, now 2, or ask for 2"):
        check_used(placed(3, 0, [0], 2), 3)


def test_gpus_are_counted_among_those_that_the_job_sees():
    assert visible_devices([0, 2], {}) == "0,2"
    assert visible_devices([0, 2], {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == "4,7"
    assert visible_devices([1], {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == "GPU-b"
    with pytest.raises(ConfigError, match=r"launcher.gpus_per_node=3 or more, and this node shows the job 2 GPUs"):
        visible_devices([0, 2], {"CUDA_VISIBLE_DEVICES": "4,5"})
