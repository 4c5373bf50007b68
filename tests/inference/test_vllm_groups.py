"""What the engine core keeps of a group, and what it passes on: with a core that only queues."""

import json
import queue
from types import SimpleNamespace

import numpy as np
import pytest

from prl.inference._vllm_groups import STATISTICS_EVERY_S, Collector, child_of, measured


class Core:
    """Takes requests and runs none; `down` is what went to the server."""

    def __init__(self):
        self.output_queue = queue.Queue()
        self.added, self.aborted, self.refuses = [], [], None
        self.scheduler = SimpleNamespace(make_stats=lambda *_: "counts", has_unfinished_requests=lambda: True)

    def preprocess_add_request(self, request):
        if request.request_id == self.refuses:
            raise RuntimeError("no grammar")
        return request, 0

    def add_request(self, request, wave):
        self.added.append(request)

    def abort_requests(self, request_ids):
        self.aborted += request_ids

    @property
    def down(self):
        return [self.output_queue.get_nowait() for _ in range(self.output_queue.qsize())]


def request(n=2, seed=5):
    params = SimpleNamespace(n=n, seed=seed, temperature=0.5)
    return SimpleNamespace(request_id="g", prompt_token_ids=[1, 2], sampling_params=params)


def output(request_id, tokens, logprobs=(), reason=None, ids=None):
    rows = np.array([tokens if ids is None else ids], dtype=np.int32).T, np.array([logprobs]).T, None, None
    return SimpleNamespace(
        request_id=request_id, new_token_ids=tokens, new_logprobs=rows if tokens else None, finish_reason=reason
    )


def message(*outputs, stats=None):
    return 0, SimpleNamespace(outputs=list(outputs), scheduler_stats=stats, finished_requests=None)


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def collector(core):
    return Collector(core)


def test_children_differ_in_id_and_seed_alone():
    whole = request(n=3)
    children = [child_of(whole, index) for index in range(3)]
    assert [child.request_id for child in children] == ["0_g", "1_g", "2_g"]
    assert [vars(child.sampling_params) for child in children] == [
        {"n": 1, "seed": seed, "temperature": 0.5} for seed in (5, 6, 7)
    ]
    assert whole.request_id == "g" and vars(whole.sampling_params) == {"n": 3, "seed": 5, "temperature": 0.5}
    assert child_of(request(seed=None), 1).sampling_params.seed is None


def test_a_group_is_answered_once_all_have_ended_and_the_rest_is_passed_on(core, collector):
    result = collector.begin(request(), "policy")
    assert [child.request_id for child in core.added] == ["0_g", "1_g"]
    core.output_queue.put_nowait(message(output("1_g", [7], [-0.5]), output("0_g", [8], [-1e9])))
    assert core.down == [], "a message of groups alone is not sent"
    other = output("other", [3], [-1.0])
    core.output_queue.put_nowait(message(output("1_g", [9], [float("nan")], "stop"), other))
    [(_, left)] = core.down
    assert left.outputs == [other] and not result.done()
    core.output_queue.put_nowait(message(output("0_g", [], reason="length"), stats="counts"))
    [(_, counts)] = core.down
    assert counts.outputs == [] and counts.scheduler_stats == "counts"
    assert json.loads(result.result(timeout=0)) == {
        "model": "policy",
        "prompt_token_ids": [1, 2],
        "choices": [
            {"index": 0, "token_ids": [8], "logprobs": [-9999.0], "finish_reason": "length"},
            {"index": 1, "token_ids": [7, 9], "logprobs": [-0.5, None], "finish_reason": "stop"},
        ],
    }
    assert not collector.children
    core.output_queue.put_nowait(message(other))
    core.output_queue.put_nowait(b"dead")
    assert [each[1].outputs if isinstance(each, tuple) else each for each in core.down] == [[other], b"dead"]


@pytest.mark.parametrize(
    "wrong", [output("0_g", [], reason="error"), output("0_g", [4], [-1.0], "stop", ids=[5])], ids=["error", "ids"]
)
def test_one_that_fails_fails_its_group_once_all_have_ended(core, collector, wrong):
    result = collector.begin(request(), "policy")
    core.output_queue.put_nowait(message(wrong))
    assert not result.done()
    core.output_queue.put_nowait(message(output("1_g", [4], [-1.0], "stop")))
    assert result.result(timeout=0) is None


def test_a_group_that_is_aborted_is_forgotten(core, collector):
    result = collector.begin(request(), "policy")
    core.output_queue.put_nowait(message(output("1_g", [4], [-1.0], "stop")))
    core.abort_requests(["0_g", "1_g", "another"])
    assert core.aborted == ["0_g", "1_g", "another"] and result.result(timeout=0) is None and not collector.children
    core.output_queue.put_nowait(message(output("0_g", [4], [-1.0])))
    assert len(core.down) == 1, "what comes late is the server's to ignore"


def test_a_group_that_cannot_be_added_whole_leaves_nothing(core, collector):
    core.refuses = "1_g"
    with pytest.raises(RuntimeError, match="no grammar"):
        collector.begin(request(), "policy")
    assert core.aborted == ["0_g", "1_g"] and not collector.children


def test_counts_are_told_now_and_then_and_always_at_rest(core, collector, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("prl.inference._vllm_groups.time.monotonic", lambda: clock[0])
    told = core.scheduler.make_stats
    assert told() == "counts" and told(None, None) is None
    assert told("of this pass alone") == "counts"
    clock[0] += STATISTICS_EVERY_S
    assert [told(), told()] == ["counts", None]
    core.scheduler.has_unfinished_requests = lambda: False
    assert told() == "counts", "else the last that one reads would be of a pass before the end"


def test_logprobs_are_numbers_of_json():
    nan, inf = float("nan"), float("inf")
    assert [measured(x) for x in (-0.25, -inf, -10000.0, nan, inf)] == [-0.25, -9999.0, -9999.0, None, None]
