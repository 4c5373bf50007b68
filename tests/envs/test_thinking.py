"""Conversations with a model that thinks, in qwen3's template, which drops the thinking of earlier turns."""

from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.engines.renderer import make_renderer
from prl.engines.replies import Completion
from prl.envs.multi_turn import Conversation
from prl.envs.tools import Tools
from prl.envs.turn import AGENT
from prl.rollouts.rollout import Rollout

THINKS = "<think>R1</think>A1<|im_end|>"
BY_THE_TEMPLATE = "<think>\nR1\n</think>\n\nA1<|im_end|>"


class Says:
    """A sampler that gives the replies in turn, and remembers what it was sent."""

    temperature = 1.0
    pool = SimpleNamespace(model="policy")
    version = 0
    pictures = None

    def __init__(self, tokenizer, renderer, replies):
        self.renderer = renderer
        self.replies = [tokenizer.encode(reply, add_special_tokens=False) for reply in replies]
        self.sent = []

    async def complete(self, prompt, *, n, key, dialogue=None, prefix=None):
        ids = self.replies[len(self.sent)]
        self.sent.append((prompt.token_ids, ids))
        return [Completion(ids, [-1.0] * len(ids), "stop")]


@pytest.fixture
def converse(tokenizer):
    """`converse(args, replies)`: the samples of a conversation as texts with what is trained, and what was sent."""

    async def run(args, replies, renderer=None):
        sampler = Says(tokenizer, renderer or make_renderer(tokenizer, name="qwen3", **args), replies)
        task = vf.Task(vf.TaskData(idx=0, prompt="U1"))
        talk = Conversation(task, AGENT, sampler, "k", tools=Tools())
        await talk.turn()
        for number in range(2, len(replies) + 1):
            await talk.turn(f"U{number}")
        rollout = Rollout(talk.trace, env_name="toy", group_id=0, start_version=0, temperature=1.0)
        rollout.attach_samples()
        trained = [
            tokenizer.decode([t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m])
            for sample in rollout.samples
        ]
        return [tokenizer.decode(sample.token_ids) for sample in rollout.samples], trained, sampler.sent

    return run


@pytest.mark.parametrize("reply_text", [THINKS, BY_THE_TEMPLATE])
async def test_stripped_thinking_starts_a_new_sample(converse, tokenizer, reply_text):
    texts, trained, sent = await converse({}, [reply_text, "A2<|im_end|>"])
    assert len(texts) == 2 and trained == [reply_text, "A2<|im_end|>"]
    assert texts[0].endswith(f"U1<|im_end|>\n<|im_start|>assistant\n{reply_text}")
    assert "R1" not in texts[1] and "<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nU2" in texts[1]
    assert texts == [tokenizer.decode(prompt + reply) for prompt, reply in sent]


@pytest.mark.parametrize("reply_text", [THINKS, BY_THE_TEMPLATE])
async def test_with_thinking_retained_it_is_one_sample(converse, tokenizer, reply_text):
    texts, trained, sent = await converse({"thinking_retention": "all"}, [reply_text, "A2<|im_end|>"])
    assert trained == [reply_text + "A2<|im_end|>"]
    assert f"{reply_text}\n<|im_start|>user\nU2" in texts[0]
    assert texts == [tokenizer.decode(sent[-1][0] + sent[-1][1])]


async def test_cut_off_thinking_is_closed_within_its_sample(converse):
    texts, trained, _ = await converse({"thinking_retention": "all"}, ["<think>R1", "A2<|im_end|>"])
    assert trained == ["<think>R1A2<|im_end|>"] and "<think>R1</think><|im_end|>\n<|im_start|>user\nU2" in texts[0]


async def test_bridge_that_omits_sampled_tokens_is_not_taken(converse, tokenizer):
    """qwen3's drops what stands behind the end of a turn."""
    renderer = make_renderer(tokenizer, name="qwen3", thinking_retention="all")
    prompt = renderer.render_ids([{"role": "user", "content": "U1"}], add_generation_prompt=True)
    reply_text = tokenizer.encode("A1<|im_end|>!", add_special_tokens=False)
    bridged = renderer.bridge_to_next_turn(prompt, reply_text, [{"role": "user", "content": "U2"}])
    assert bridged.token_ids[: len(prompt + reply_text)] != prompt + reply_text, "else this test shows nothing"
    _, trained, _ = await converse({}, ["A1<|im_end|>!", "A2<|im_end|>"], renderer)
    assert trained == ["A1<|im_end|>!", "A2<|im_end|>"]
