"""opsd: what the policy is shown in front of a rollout, where that comes from, and how it is cut off again."""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import verifiers.v1 as vf

from prl.algorithms.base import Algorithm
from prl.algorithms.opsd import OPSDAlgorithm
from prl.base.errors import ConfigError
from prl.rollouts.messages import Reference

ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "It's 4."}]}


class Shown(vf.TaskData):
    """A task with a demonstration of its own."""

    demonstration: str = "from the task"
    solution: str = "solved"


@pytest.fixture
def opsd(attached):
    def make(**settings):
        return attached(OPSDAlgorithm(**settings))

    return make


@pytest.fixture
def shown(make_rollout):
    """A rollout whose task has a demonstration, and whose info holds `info`."""

    def make(info=None, data=None, lengths=(4,)):
        rollout = make_rollout(lengths=lengths)
        rollout.trace.info = info or {}
        rollout.trace.task.data = data or Shown(idx=8, prompt="?")
        return rollout

    return make


@pytest.fixture
def hint_ids(renderer):
    """One leading system message, spelled out in the chat format, and no invitation to answer."""
    tokenizer = renderer._tokenizer
    return lambda text: tokenizer.encode(f"<|im_start|>system\n{text}<|im_end|>\n", add_special_tokens=False)


async def test_hint_is_a_system_message_before_every_sample(opsd, shown, reference, hint_ids, play):
    (rollout,) = await play(opsd(template="{See}: {demonstration}!"), [shown(lengths=(4, 2, 3))])
    hint = hint_ids("{See}: from the task!")
    assert sorted(reference.asked, key=len) == [hint + list(range(n)) for n in (2, 3, 4)]
    for sample in rollout.samples:
        assert sample.ref_logprobs == reference.logprobs(hint + sample.token_ids)[len(hint) :]
        assert sample.token_ids == list(range(len(sample.mask))), "the hint is no part of what is trained on"


@pytest.mark.parametrize(
    ("info", "key", "found"),
    [
        ({"demonstration": "from info"}, "demonstration", "from info"),
        ({}, "demonstration", "from the task"),
        ({"solution": "better", "demonstration": "x"}, "solution", "better"),
        ({"demonstration": ""}, "demonstration", "from the task"),
        ({"demonstration": [{"role": "user", "content": "q"}, ANSWER, ANSWER]}, "demonstration", "It's 4.\n\nIt's 4."),
        ({"demonstration": "{x} {demonstration} %s"}, "demonstration", "{x} {demonstration} %s"),
    ],
)
async def test_info_comes_first_and_the_tasks_field_second(opsd, shown, reference, hint_ids, play, info, key, found):
    await play(opsd(template="{demonstration}", demo_key=key), [shown(info)])
    assert reference.asked == [hint_ids(found) + [0, 1, 2, 3]]


@pytest.mark.parametrize(("identity", "named"), [({"idx": 8}, "task 8"), ({"idx": 8, "id": "gsm-3"}, "task gsm-3")])
async def test_rollout_without_a_demonstration_fails_by_task(opsd, shown, play, identity, named):
    rollout = shown(data=vf.TaskData(prompt="?", **identity))
    rollout.env_name = "maths"
    other = shown()  # the field is there: its siblings go on
    await play(opsd(demo_key="solution"), [rollout, other])
    assert re.match(rf"ValueError: no 'solution' to show.*{named} of env 'maths'", rollout.error)
    assert rollout.error_kind == "env" and rollout.samples[0].ref_logprobs is rollout.samples[0].ref_kl_weights is None
    assert other.error is None and other.samples[0].ref_kl_weights == [0.0, 1.0, 1.0, 1.0]


class Other:
    """A renderer of some other chat format, over the same tokenizer."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.asked = []

    def render_ids(self, messages, **options):
        self.asked.append((messages, options))
        return self._tokenizer.encode("#" + messages[0]["content"], add_special_tokens=False)


async def test_auto_is_the_runs_own_renderer(reference, renderer, shown, play, attached):
    other = Other(renderer._tokenizer)
    (rollout,) = await play(attached(OPSDAlgorithm(template="{demonstration}"), renderer=other), [shown()])
    assert other.asked[-1] == ([{"role": "system", "content": "from the task"}], {"add_generation_prompt": False})
    hint = renderer._tokenizer.encode("#from the task", add_special_tokens=False)
    assert reference.asked == [[*hint, 0, 1, 2, 3]]
    assert rollout.samples[0].ref_logprobs == reference.logprobs([*hint, 0, 1, 2, 3])[len(hint) :]


async def test_renderer_by_name_uses_the_policys_tokenizer(reference, renderer, shown, hint_ids, play, attached):
    other = Other(renderer._tokenizer)
    await play(attached(OPSDAlgorithm(template="{demonstration}", renderer="qwen3"), renderer=other), [shown()])
    assert other.asked == [] and reference.asked == [hint_ids("from the task") + [0, 1, 2, 3]]


def test_renderer_unfit_for_the_tokenizer_is_refused(attached):
    with pytest.raises(ConfigError, match="^OPSDAlgorithm.renderer=llama-3 does not fit"):
        attached(OPSDAlgorithm(renderer="llama-3"))


def test_room_is_kept_for_the_longest_hint(opsd, hint_ids):
    shown = ["short", "a much longer demonstration of the answer", "middling"]
    values = ["short", [{"role": "assistant", "content": shown[1]}], "middling", None]
    tasks = [SimpleNamespace(data=SimpleNamespace(demonstration=value)) for value in values]
    assert opsd(template="See: {demonstration}").reserve(tasks) == max(len(hint_ids(f"See: {text}")) for text in shown)
    assert opsd().reserve([]) == 0
    assert Algorithm().reserve(tasks) == 0


def test_a_demonstration_without_a_reply_is_refused(opsd):
    with pytest.raises(ConfigError, match=r"^algo\.demo_key=demonstration: .* no reply"):
        opsd().reserve([SimpleNamespace(data=SimpleNamespace(demonstration=[{"role": "user", "content": "q"}]))])


@pytest.mark.parametrize("tokens", [[], ValueError("no user message")])
def test_renderer_that_shows_no_hint_is_refused(attached, renderer, monkeypatch, tokens):
    other = Other(renderer._tokenizer)
    monkeypatch.setattr(other, "render_ids", Mock(side_effect=[tokens]))
    with pytest.raises(ConfigError, match="hint"):
        attached(OPSDAlgorithm(), renderer=other)


async def test_the_hint_is_shipped_to_a_reference_in_the_trainer(opsd, shown, reference, hint_ids, play):
    algorithm = opsd(template="{demonstration}", reference="ema", divergence="reverse_kl")
    (rollout,) = await play(algorithm, [shown(lengths=(4, 2))])
    expected = Reference("ema:0.999", "reverse_kl", prefix=tuple(hint_ids("from the task")))
    assert [sample.reference for sample in rollout.samples] == [expected] * 2
    assert reference.asked == [] and algorithm.trainer_references() == {"ema:0.999"}


async def test_the_policys_most_likely_tokens_come_without_those_of_the_hint(opsd, shown, hint_ids, play):
    algorithm = opsd(template="{demonstration}", divergence="reverse_kl", top_k=2)
    (rollout,) = await play(algorithm, [shown(lengths=(4,))])
    (sample,) = rollout.samples
    begin = len(hint_ids("from the task"))
    assert sample.top_logprobs == [[-1.0 - begin - place, -2.0 - begin - place] for place in range(4)]
    assert sample.reference == Reference("", "reverse_kl") and algorithm.trainer_references() == set()
