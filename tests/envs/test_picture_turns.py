"""Pictures in conversations: from a task, from code and from tools; each failure is that of its rollout."""

import base64
import io
import json
import re

import pytest
import verifiers.v1 as vf
from mcp.types import ImageContent
from PIL import Image
from scripted_models import saying
from seeing_models import seeing_model
from verifiers.v1.configs.env import EnvConfig as OwnConfig

from prl.config.schema import EnvConfig
from prl.engines.frozen import clients_of
from prl.engines.pictures import PictureProcessor
from prl.engines.renderer import make_renderer
from prl.engines.sampler import Sampler
from prl.engines.tokenizers import load_tokenizer
from prl.envs.environment import Environment
from prl.envs.group import GroupRequest, play_episodes
from prl.envs.multi_turn import InProcessContext, bind_in_process
from prl.envs.tasksets.tools import opening
from prl.envs.tools import Tools
from prl.envs.turn import kept_parts
from prl.rollouts.images import decode
from prl.rollouts.pictures import PictureStore, digest_of

RED, BLUE = Image.new("RGB", (32, 16), "red"), Image.new("RGB", (16, 16), "blue")


def data_url(image, form="PNG"):
    written = io.BytesIO()
    image.save(written, format=form)
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


of_the_package = pytest.mark.parametrize("renderer", ["qwen3-vl"], indirect=True)
"""The other reads no calls of tools."""


@pytest.fixture(params=["qwen3-vl", "default"])
def renderer(request, tmp_path):
    path = seeing_model("qwen3_vl", tmp_path / "model")
    tokenizer = load_tokenizer(path, "model.path")
    processor = PictureProcessor(path, tokenizer, PictureStore(tmp_path / "pictures"))
    return make_renderer(tokenizer, name=request.param, pictures=processor)


class Drawer(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    @vf.tool
    async def draw(self, what: str):
        """Return a picture."""
        large = Image.new("1", (5000, 5000))
        return {
            "red": RED,
            "list": ["left: ", RED, {"side": "right"}, BLUE],
            "mcp": [ImageContent(type="image", data=data_url(BLUE).partition(",")[2], mimeType="image/png")],
            "large": large,
            "damaged": {"type": "image_url", "image_url": {"url": data_url(RED)[:90]}},
            "text": ["no", "picture"],
            "page": [{"type": "image", "alt": "logo"}, {"type": "image", "url": "https://example.org/a.png"}],
            "nested": {"pictures": [RED]},
        }[what]


def call(what):
    return f"<tool_call>\n{json.dumps({'name': 'draw', 'arguments': {'what': what}})}\n</tool_call>"


async def played(sampler, run, *, toolsets=(Drawer,), prompt="1+2=", n=1):
    class Config(OwnConfig):
        agent: vf.AgentConfig = vf.AgentConfig()

    class Played(vf.Env[Config]):
        async def run(self, task, agents):
            await run(task, agents)

    class Tasks(vf.Taskset[vf.Task, vf.TasksetConfig]):
        def load(self):
            yield vf.Task(vf.TaskData(idx=0, prompt=prompt))

    tools = Tools([toolset(vf.ToolsetConfig()) for toolset in toolsets])
    env = bind_in_process(Played, Tasks(vf.TasksetConfig()), tools)
    task = vf.Task(vf.TaskData(idx=0, prompt=prompt))
    request = GroupRequest(env_name="toy", task=task, n=n, sampler=sampler, group_id=1, timeout_s=60.0)
    return await play_episodes(env, InProcessContext, request)


async def one_reply(task, agents):
    await agents.agent.run(task)


def of_first(replies):
    """The script of a group whose first episode has these replies; others say `fine`."""
    return lambda conversation, turn: replies[turn] if "/1/0/" in f"{conversation}/" else "fine"


def digests(rollout):
    [sample] = rollout.samples
    return [picture.digest for picture in sample.pictures or ()]


@of_the_package
async def test_tools_return_pictures_in_several_turns(scripted):
    [rollout] = await played(scripted([call("red"), call("list"), call("mcp"), "done"]), one_reply)
    assert rollout.error is None
    red, blue = digest_of(RED), digest_of(BLUE)
    answers = [node.message for node in rollout.trace.nodes if node.message.role == "tool"]
    words = [[p.text if p.type == "text" else p.image_url.url for p in answer.content] for answer in answers]
    assert words == [
        [f"picture:{red}"],
        ["left: ", f"picture:{red}", '{"side":"right"}', f"picture:{blue}"],
        [f"picture:{blue}"],
    ]
    if len(rollout.samples) == 1:
        assert digests(rollout) == [red, red, blue, blue]
        [sample] = rollout.samples
        pads = {sample.token_ids[at] for p in sample.pictures for at in range(p.start, p.stop)}
        assert len(pads) == 1 and sample.token_ids.count(pads.pop()) == sum(p.length for p in sample.pictures)
    assert "base64" not in rollout.trace.model_dump_json()


PAGE = '[{"type":"image","alt":"logo"},{"type":"image","url":"https://example.org/a.png"}]'


@of_the_package
@pytest.mark.parametrize(("what", "text"), [("text", '["no","picture"]'), ("page", PAGE)])
async def test_an_answer_without_pictures_is_text(scripted, what, text):
    [rollout] = await played(scripted([call(what), "done"]), one_reply)
    [answer] = [node.message for node in rollout.trace.nodes if node.message.role == "tool"]
    assert answer.content == text


@of_the_package
async def test_a_picture_within_other_data_is_an_error_that_the_model_reads(scripted):
    [rollout] = await played(scripted([call("nested"), "done"]), one_reply)
    [answer] = [node.message for node in rollout.trace.nodes if node.message.role == "tool"]
    assert "a picture within other data: return it alone" in answer.content and " at 0x" not in answer.content


def test_a_part_may_have_a_picture_and_a_text(tmp_path):
    part = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    for text, also in (("caption", [{"type": "text", "text": "caption"}]), ("", []), (None, [])):
        [shown, *others] = kept_parts([part | {"text": text}], "a message", PictureStore(tmp_path))
        assert shown["image_url"]["url"] == f"picture:{digest_of(RED)}" and others == also


def test_what_reset_says_joins_a_prompt_with_a_picture():
    seen = vf.ImageUrlContentPart(image_url={"url": f"picture:{digest_of(RED)}"})
    [message] = opening([vf.UserMessage(content=[seen])], "now answer")
    assert [part.type for part in message.content] == ["image_url", "text"]
    assert message.content[1].text.strip() == "now answer"


@of_the_package
@pytest.mark.parametrize(("what", "why"), [("large", "above model.max_pixels"), ("damaged", "damaged or cut off")])
async def test_a_bad_picture_of_a_tool_fails_its_rollout_alone(scripted, what, why):
    rollouts = await played(scripted(of_first([call(what), "done"])), one_reply, n=2)
    assert [rollout.failed for rollout in rollouts] == [True, False]
    assert rollouts[0].outcome.source == "env" and re.search(why, str(rollouts[0].error))


async def test_what_code_says_may_have_pictures(scripted):
    async def talk(task, agents):
        async with agents.agent.interaction(task) as conversation:
            await conversation.turn()
            await conversation.turn([{"role": "user", "content": [{"type": "image", "image": BLUE}]}])
            part = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=data_url(RED)))
            await conversation.turn([vf.UserMessage(content=[part, vf.TextContentPart(text="?")])])

    opening = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(RED)}}]}]
    [rollout] = await played(scripted(["a", "b", "c"]), talk, prompt=opening, toolsets=())
    assert rollout.error is None
    shown = [
        part.image_url.url
        for node in rollout.trace.nodes
        for part in node.message.content
        if not isinstance(part, str) and part.type == "image_url"
    ]
    assert shown == [f"picture:{digest_of(image)}" for image in (RED, BLUE, RED)]


async def test_a_path_in_what_code_says_is_not_read(scripted, tmp_path):
    RED.save(tmp_path / "red.png")

    async def talk(task, agents):
        async with agents.agent.interaction(task) as conversation:
            await conversation.turn(
                [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "red.png")}]}]
            )

    [rollout] = await played(scripted(["a"]), talk, prompt=None, toolsets=())
    assert rollout.failed and "code opens it itself" in str(rollout.error)


def row_env(tmp_path, taskset="prl.envs.tasksets.jsonl", store=None, **config):
    RED.save(tmp_path / "red.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>2+2=", "answer": "4", "images": "red.png"}))
    args = {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0}
    return Environment("e", EnvConfig(taskset, args, **config), eval_tasks=0, pictures=store)


async def test_a_reply_with_a_placeholder_fails_alone(renderer, tmp_path, scripted):
    env = row_env(tmp_path, store=renderer.pictures.store)
    async with env.serving():
        sampler = scripted(lambda *_: ["4", "<|image_pad|>", "5"])
        rollouts = await env.play(env.tasks[0], 3, sampler, group_id=0)
    assert [rollout.failed for rollout in rollouts] == [False, True, False]
    assert rollouts[1].outcome.source == "tokens" and [r.reward for r in rollouts[::2]] == [1.0, 0.0]
    assert digests(rollouts[0]) == digests(rollouts[2]) == [digest_of(RED)]

    async def talk(task, agents):
        async with agents.agent.interaction(task) as conversation:
            await conversation.turn()
            await conversation.turn("and?")

    rollouts = await played(scripted(of_first(["<|video_pad|>", "b"])), talk, n=2)
    assert [rollout.failed for rollout in rollouts] == [True, False]
    assert rollouts[0].outcome.source == "tokens"


@pytest.mark.parametrize("by", ["endpoint", "policy"])
async def test_a_judge_is_shown_the_pictures(renderer, tmp_path, server, by):
    chat = "/v1/chat/completions"
    message = {"role": "assistant", "content": "Score: 10"}
    server.replies[chat] = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    server.replies["/v1/models"] = {"data": [{"id": "large"}]}
    reference = "policy" if by == "policy" else {"name": "large", "base_url": f"{server.url}/v1", "timeout_s": 5.0}
    store = renderer.pictures.store
    env = row_env(tmp_path, "prl.envs.tasksets.judge", store, models={"judge": reference})
    sampler = Sampler()
    policy = saying(renderer._tokenizer, "4", "Score: 10", version=3)
    sampler.attach(pool=policy, renderer=renderer, max_model_len=4096, seed=0)
    env.connect(sampler, clients_of({}, store))
    async with env.serving():
        [rollout] = await env.play(env.tasks[0], 1, sampler, group_id=0)
    assert rollout.error is None and rollout.reward == 1.0
    if by == "endpoint":
        [sent] = server.bodies[chat]
        picture, question = sent["messages"][0]["content"]
        assert decode(picture["image_url"]["url"], 10**6).tobytes() == RED.tobytes()
        assert "[a picture, shown above]" in question["text"] and "2+2=" in question["text"]
    else:
        [first, asked] = [ids for ids, _ in policy.requests]
        [pad] = {first[at] for p in rollout.samples[0].pictures for at in range(p.start, p.stop)}
        assert asked.count(pad) == first.count(pad) == 2, "16 by 16 pixels are a token"
