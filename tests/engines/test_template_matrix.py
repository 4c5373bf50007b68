"""Chat templates in other people's shapes: a scripted model plays, and all that it is sent is what the template makes
of the conversation as a whole; what is graded, trained and kept has the parts of its reply in their places."""

import functools
import json
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import template_shapes
import verifiers.v1 as vf
from template_shapes import SHAPES, TAUGHT
from transformers import AutoTokenizer

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.engines.chat import Answer, Dialogue, as_completion
from prl.engines.renderer import make_renderer
from prl.engines.replies import Completion
from prl.envs.environment import Environment
from prl.envs.group import GroupRequest, play_group
from prl.envs.multi_turn import Conversation
from prl.envs.tools import Tools
from prl.envs.turn import AGENT
from prl.launch.components import build_components
from prl.launch.prompts import check_demonstrations, rendered_prompts
from prl.rollouts.rollout import Rollout

CASES = ("single", "turns", "system", "tools", "shown")
STARTS = {
    "single": ["env=jsonl"],
    "turns": ["env=math_retry", "envs.math_retry.args.num_tasks=8", "envs.math_retry.eval_args=null"],
    "system": ["env=jsonl", "envs.jsonl.args.system=Be brief."],
    "tools": ["env=calculator", "envs.calculator.args.num_tasks=8", "envs.calculator.eval_args=null"],
    "shown": [
        "env=jsonl",
        "algo=sft",
        "algo.sampling.source=demonstrations",
        "algo.sampling.demo_key=answer",
        "orchestrator.group_size=1",
    ],
}
"""The run that asks for each case."""


def outcome(shape, case):
    """What the table has in a cell."""
    return shape.but.get(case, "right" if case != "tools" or shape.parser else "refused")


def cells(*outcomes):
    return [
        pytest.param(shape, case, id=f"{shape.name}-{case}")
        for shape in SHAPES
        for case in CASES
        if outcome(shape, case) in outcomes
    ]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """`tokenizer_of(shape)`: of a model folder, made once."""

    @functools.cache
    def load(name):
        shape = next(shape for shape in SHAPES if shape.name == name)
        tokenizer = template_shapes.tiny_tokenizer(shape)
        path = tmp_path_factory.mktemp("shapes") / name
        template_shapes.save(path, shape, tokenizer, template_shapes.tiny_model(tokenizer))
        return AutoTokenizer.from_pretrained(path)

    return lambda shape: load(shape.name)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """`run_of(case)`: the algorithm and the environment of a run, made once."""
    data = tmp_path_factory.mktemp("data") / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"U{i}", "answer": f"A{i}"}) + "\n" for i in range(8)))
    rows = [f"envs.jsonl.args.path={data}", "envs.jsonl.args.eval_fraction=0", "envs.jsonl.eval_args=null"]

    @functools.cache
    def make(case):
        config = compose(["run.name=x", *STARTS[case], *(rows if "env=jsonl" in STARTS[case] else [])])
        ((name, env),) = config.envs.items()
        return build_components(config).envs[name].algorithm, Environment(name, env, eval_tasks=0)

    return make


def renderer_of(shape, tokenizer):
    settings = {"name": "default", "tool_parser": shape.parser} if shape.parser else {}
    return make_renderer(tokenizer, **settings)


class Scripted:
    """A model that gives replies in turn, and keeps what it is sent as text."""

    temperature, version, pool, pictures = 1.0, 0, SimpleNamespace(model="policy"), None

    def __init__(self, tokenizer, renderer, replies):
        self.tokenizer, self.renderer, self.replies, self.sent = tokenizer, renderer, replies, []

    async def complete(self, prompt, *, n, key, dialogue=None, prefix=None):
        ids = self.tokenizer.encode(self.replies[len(self.sent)], add_special_tokens=False)
        self.sent.append(self.tokenizer.decode(prompt.token_ids))
        return [Completion(ids, [-1.0] * len(ids), "stop")] * n


class Plays:
    """A shape's tokenizer and renderer, as a run makes them."""

    def __init__(self, shape, tokenizer):
        self.shape, self.tokenizer = shape, tokenizer
        self.renderer = renderer_of(shape, tokenizer)

    def reply(self, number):
        return f"{self.shape.thinks}A{number}{self.shape.end_of_turn}"

    def whole(self, messages, **options):
        """The prompt by the template alone."""
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)

    def model(self, *replies):
        return Scripted(self.tokenizer, self.renderer, replies)

    def check(self, rollout, replies, thought):
        """All tokens of the replies are trained, ends included, and what is graded is in its place."""
        trained = [
            token
            for sample in rollout.samples
            for token, trains in zip(sample.token_ids, sample.mask, strict=True)
            if trains
        ]
        assert self.tokenizer.decode(trained) == "".join(replies)
        last = [node.message for node in rollout.trace.nodes if node.message.role == "assistant"][-1]
        assert rollout.trace.last_reply == last.content == f"A{len(replies)}"
        assert (last.reasoning_content or "").strip() == ("R" if thought else "")


async def single(play, system=False):
    model = play.model(play.reply(1))
    task = vf.Task(vf.TaskData(idx=0, prompt="U1", system_prompt="Be brief." if system else None))
    asked = GroupRequest(env_name="toy", task=task, n=2, sampler=model, group_id=0, timeout_s=math.inf)
    rollouts = await play_group(asked)
    assert model.sent == [play.whole(template_shapes.conversation(system=system))]
    assert len(rollouts) == 2 and ("Be brief." in model.sent[0]) == system
    for rollout in rollouts:
        assert rollout.error is None
        play.check(rollout, model.replies, play.shape.thinks)


async def system(play):
    await single(play, system=True)


def conversation_of(play, model, tools=None):
    task = vf.Task(vf.TaskData(idx=0, prompt="U1"))
    return Conversation(task, AGENT, model, "k", tools=tools or Tools())


def finished(talk):
    rollout = Rollout(talk.trace, env_name="toy", group_id=0, start_version=0, temperature=1.0)
    rollout.attach_samples()
    return rollout


async def turns(play):
    model = play.model(*(play.reply(number) for number in (1, 2, 3)))
    talk = conversation_of(play, model)
    await talk.turn()
    await talk.turn("U2")
    await talk.turn("U3")
    assert model.sent == [play.whole(template_shapes.conversation(turns=number)) for number in (1, 2, 3)]
    for number in (1, 2):
        ends = re.findall(f"A{number}((?:{re.escape(play.shape.end_of_turn)})*)", model.sent[-1])
        assert ends == [play.shape.end_of_turn]
    play.check(finished(talk), model.replies, play.shape.thinks)


class Sums(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    IN_PROCESS = True

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """The sum."""
        return a + b


async def tools(play):
    """The model is told of the tool, and then of its own call and the answer, as far as the template shows these."""
    sums, question = Tools([Sums(vf.ToolsetConfig())]), {"role": "user", "content": "U1"}
    model = play.model(play.shape.call, play.reply(2))
    talk = conversation_of(play, model, sums)
    await talk.turn()
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    if "R" in play.shape.call:
        asked["reasoning_content"] = "R"
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_0", "name": "add"}
    assert model.sent == [
        play.whole([question], tools=sums.wire),
        play.whole([question, asked, answer], tools=sums.wire),
    ]
    assert '"add"' in model.sent[0] and re.search("\\n3\\b", model.sent[1])
    play.check(finished(talk), model.replies, play.shape.thinks)


async def shown(play):
    answer = Answer({"role": "assistant", "content": "A1"})
    done = as_completion(play.renderer, Dialogue(template_shapes.conversation()), answer, 10**6)
    assert play.tokenizer.decode(done.token_ids) == f"{play.shape.shows}A1{play.shape.end_of_turn}"


PAGE = Path(__file__).parents[2] / "experiments" / "benchmarks" / "renderers.md"
PLAYED = {each.__name__: each for each in (single, turns, system, tools, shown)}


@pytest.mark.parametrize(("shape", "case"), cells("right", "warned"))
async def test_the_model_is_sent_what_the_template_makes_of_the_whole(tokenizer_of, shape, case):
    await PLAYED[case](Plays(shape, tokenizer_of(shape)))


@pytest.mark.parametrize(("shape", "case"), cells("right", "warned", "refused"))
def test_a_run_says_before_it_starts_what_a_template_cannot_do(tokenizer_of, run_of, shape, case):
    algorithm, environment = run_of(case)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            renderer = renderer_of(shape, tokenizer_of(shape))
            environment.check_renderer(renderer)
            rendered_prompts(environment, renderer, "renderer")
            keys = {"algo": "algo", "renderer": "renderer"}
            check_demonstrations(keys, 1, algorithm, environment, renderer)
            found = "right"
        except ConfigError as error:
            found = "refused"
            assert "renderer" in str(error) and "\n" not in str(error)
    if found == "right" and any("template" in str(each.message) for each in given):
        found = "warned"
    assert found == outcome(shape, case)


def test_the_page_has_the_matrix():
    table = PAGE.read_text().partition("## Templates that were tried")[2].partition("\n##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len(SHAPES)
    for shape, (name, does, *found, taught) in zip(SHAPES, rows, strict=True):
        assert (name, does) == (f"`{shape.name}`", shape.does)
        given = ["yes" if outcome(shape, case) == "right" else outcome(shape, case) for case in CASES]
        assert found == [
            f"`{shape.parser}`, {one}".removesuffix(", yes") if case == "tools" and shape.parser else one
            for case, one in zip(CASES, given, strict=True)
        ]
        assert taught == ("yes" if shape.name in TAUGHT else "")
