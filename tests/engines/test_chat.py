"""Replies that come as messages: what a chat endpoint is asked, the policy's tokens of what it says, demonstrations."""

import pytest
import verifiers.v1 as vf

from prl.base.errors import ConfigError, EngineError
from prl.config.model_reference import FrozenModelConfig
from prl.engines.chat import (
    Answer,
    ChatSource,
    Demonstrations,
    Dialogue,
    UnusableReply,
    as_completion,
    replies_of,
    words_of,
)
from prl.engines.frozen import FrozenPool
from prl.engines.renderer import make_renderer
from prl.engines.sampler import Sampler
from prl.engines.tokenizers import MAX_TOKENS, TokenizerProbe
from prl.rollouts.inputs import ModelInput

CHAT = "/v1/chat/completions"
IDS = "/v1/completions"
ASK = Dialogue([vf.UserMessage(content="1+1=")])
EMPTY = "<think>\n\n</think>\n\n"


def reply(content, finish_reason="stop", **more):
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


@pytest.fixture
async def frozen(server):
    pool = FrozenPool(FrozenModelConfig(name="large", base_url=f"{server.url}/v1"))
    yield pool
    await pool.close()


@pytest.fixture
def sampler(frozen, renderer):
    """Samples by chat messages."""
    sampler = Sampler(temperature=0.5, top_k=5)
    sampler.attach(pool=ChatSource(frozen), renderer=renderer, max_model_len=100, seed=7)
    return sampler


def text_of(completion, tokenizer):
    return tokenizer.decode(completion.token_ids)


# --- as tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text", "reason"),
    [
        (Answer({"role": "assistant", "content": "2"}), EMPTY + "2<|im_end|>", "stop"),
        (
            Answer({"role": "assistant", "content": "2", "reasoning_content": "easy"}),
            "<think>\neasy\n</think>\n\n2<|im_end|>",
            "stop",
        ),
        (Answer({"role": "assistant", "content": "2"}, "length"), EMPTY + "2", "length"),
    ],
)
def test_reply_tokens_are_the_templates(renderer, tokenizer, answer, text, reason):
    made = as_completion(renderer, ASK, answer, max_tokens=50)
    assert (text_of(made, tokenizer), made.finish_reason) == (text, reason)
    assert made.logprobs == [] and made.start_version is None


def test_a_prompt_that_opens_the_reply_leaves_the_rest_of_it(tokenizer):
    renderer = make_renderer(tokenizer, name="qwen3", enable_thinking=False)
    made = as_completion(renderer, ASK, Answer({"role": "assistant", "content": "2"}), max_tokens=50)
    assert text_of(made, tokenizer) == "2<|im_end|>"


def test_long_reply_is_cut_a_demonstration_is_not(renderer, tokenizer):
    message = {"role": "assistant", "content": "123456"}
    cut = as_completion(renderer, ASK, Answer(message), max_tokens=8)
    assert len(cut.token_ids) == 8 and cut.finish_reason == "length"
    whole = as_completion(renderer, ASK, Answer(message), max_tokens=50)
    assert whole.token_ids[:8] == cut.token_ids
    exactly = as_completion(renderer, ASK, Answer(message, may_be_cut=False), max_tokens=len(whole.token_ids))
    assert exactly == whole
    with pytest.raises(UnusableReply, match=rf"demonstration has {len(whole.token_ids)} tokens, where 8 fit"):
        as_completion(renderer, ASK, Answer(message, may_be_cut=False), max_tokens=8)


# --- a chat endpoint --------------------------------------------------------------------------------------------------


async def test_each_reply_is_a_request_with_its_seed(server, sampler, tokenizer):
    server.replies[CHAT] = reply("2")
    completions = await sampler.complete(ModelInput([5] * 10), n=2, key="k", dialogue=ASK)
    assert [text_of(each, tokenizer) for each in completions] == [EMPTY + "2<|im_end|>"] * 2
    first, second = sorted(server.bodies[CHAT], key=lambda body: body["seed"])
    assert second == first | {"seed": first["seed"] + 1}
    del first["seed"]
    assert first == {
        "model": "large",
        "messages": [{"role": "user", "content": "1+1="}],
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 5,
        "max_tokens": 89,
    }


async def test_tools_and_thoughts_become_the_policys_tokens(server, sampler, tokenizer):
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    server.replies[CHAT] = reply(None, "tool_calls", tool_calls=[call], reasoning="I call")
    earlier = vf.AssistantMessage(content="hm", reasoning_content="secret")
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    dialogue = Dialogue([*ASK.given, earlier, vf.UserMessage(content="so?")], tools)
    (made,) = await sampler.complete(ModelInput([5]), n=1, key="k", dialogue=dialogue)
    body = server.bodies[CHAT][0]
    assert body["tools"] == tools and "secret" not in str(body["messages"]) and len(body["messages"]) == 3
    text = '<think>\nI call\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert (text_of(made, tokenizer), made.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    ("answered", "says"),
    [
        ({"choices": []}, "cannot be read"),
        (reply("2", "content_filter"), "gave no whole reply: it ended with 'content_filter'"),
        ((400, "too long"), "HTTP 400: too long"),
    ],
)
async def test_an_endpoint_that_gives_no_reply_fails_the_request(server, sampler, answered, says):
    server.replies[CHAT] = answered
    with pytest.raises(EngineError, match=says):
        await sampler.complete(ModelInput([5]), n=1, key="k", dialogue=ASK)


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probe(tokenizer):
    return TokenizerProbe.of(tokenizer, "tiny")


def test_a_probe_reaches_all_over_the_vocabulary_and_its_marks(probe, tokenizer):
    assert probe.token_ids == tokenizer.encode(probe.text, add_special_tokens=False)
    assert len(probe.token_ids) <= MAX_TOKENS
    assert {tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "<|im_end|>")} <= set(probe.token_ids)
    assert max(probe.token_ids) == len(tokenizer) - 1 and len(set(probe.token_ids)) > 60


@pytest.mark.parametrize(
    ("answered", "shared", "refusal"),
    [
        (lambda ids: {"prompt_token_ids": ids, "token_ids": [3]}, True, None),
        (
            lambda ids: {"prompt_token_ids": ids[:-1], "token_ids": [3]},
            False,
            "'large' .* has another tokenizer than tiny",
        ),
        (lambda ids: {"prompt_token_ids": ids[::-1], "token_ids": [3]}, False, r"algo\.align=text"),
        (lambda ids: {"prompt_token_ids": ids}, None, "does not say how it tokenizes"),
        (lambda ids: {"text": "x"}, None, "the tokenizer of tiny"),
    ],
)
async def test_an_endpoint_is_asked_for_the_tokens_of_a_text(server, frozen, probe, answered, shared, refusal):
    server.replies[IDS] = {"choices": [{"index": 0, **answered(probe.token_ids)}]}
    assert await frozen.shares_tokenizer(probe) is shared
    body = server.bodies[IDS][0]
    assert (body["prompt"], body["add_special_tokens"], body["return_token_ids"]) == (probe.text, False, True)
    if refusal is None:
        await frozen.require_tokenizer(probe)
    else:
        with pytest.raises(ConfigError, match=refusal):
            await frozen.require_tokenizer(probe)


# --- demonstrations ---------------------------------------------------------------------------------------------------


class Data(vf.TaskData):
    answer: object = None


@pytest.mark.parametrize(
    ("value", "contents"),
    [
        ("2", ["2"]),
        (2, ["2"]),
        (
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
                vf.AssistantMessage(content="b"),
                {"role": "assistant", "content": None},
            ],
            ["a", "b", ""],
        ),
    ],
)
def test_the_replies_of_a_demonstration(value, contents):
    assert [each["content"] for each in replies_of(value, "answer")] == contents


@pytest.mark.parametrize("value", [None, "", [], {}, ["a"], [{"from": "gpt"}], [{"role": "user", "content": "q"}]])
def test_a_field_without_a_reply_is_refused(value):
    with pytest.raises(ValueError, match="answer holds no reply"):
        replies_of(value, "answer")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "assistant", "content": "a\nb"}], "a\nb"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "a\nb"),
        (
            [
                {"role": "user", "content": "1+1?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
                },
                {"role": "tool", "content": "2"},
            ],
            'user: 1+1?\n\nassistant: {"name": "add", "arguments": "{}"}\n\ntool: 2',
        ),
    ],
)
def test_the_words_of_messages(messages, text):
    assert words_of(messages) == text


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "x"}}], ["a"], {"a": 1}])
def test_a_message_that_is_no_text_has_no_words(content):
    with pytest.raises(ValueError, match="a part that is no text"):
        words_of([{"role": "user", "content": content}])


async def test_demonstration_is_played_reply_by_reply():
    shown = [{"role": "user", "content": "0+1="}, {"role": "assistant", "content": "1"}]
    replies = [{"role": "assistant", "content": text} for text in ("2", "3")]
    task = Data(prompt=[*shown, {"role": "user", "content": "1+1="}], answer=replies)
    source = Demonstrations("answer")
    so_far = list(task.prompt)
    for text in ("2", "3"):
        (first, second) = await source.answer(Dialogue(so_far, task=task), {}, n=2)
        assert first == second and first.message["content"] == text and not first.may_be_cut
        so_far += [vf.AssistantMessage(content=text), vf.UserMessage(content="and?")]
    with pytest.raises(UnusableReply, match="asks for reply 3, and the task's answer has 2"):
        await source.answer(Dialogue(so_far, task=task), {}, n=1)
