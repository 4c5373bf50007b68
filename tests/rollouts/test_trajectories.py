"""Random conversations against the definition: what is trained, once, in the context it was sampled in.

The definition, read from a plain log of what each model call was sent and sampled: a call whose prompt extends, token
for token, everything that some other sequence holds joins that sequence, the longest such and of two alike the one that
was there first; else it starts a new one. So five calls of which the fourth does not extend what stands before it, and
the fifth extends the fourth, are two sequences: calls 1 to 3 and calls 4 to 5. Every sequence is one sample, and trains
what its own calls sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderers.base import RenderedTokens
from verifiers.v1 import graph
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.trace import TimeSpan, Trace, TraceTask
from verifiers.v1.types import Message, SystemMessage, ToolMessage, UserMessage

from prl.engines.replies import Completion
from prl.envs.turn import AGENT, commit
from prl.rollouts.rollout import Rollout

CASES = {"tokens of its own": 120, "qwen3": 40}
"""Conversations drawn with each renderer, the same in every run of the suite. With many more, it searches."""

SYSTEM, THINK, UNTHINK, END, BREAK, USER, TOOL, ASSISTANT = range(2, 10)
ROLES = {SYSTEM: "system", USER: "user", TOOL: "tool", ASSISTANT: "assistant"}
OPENS = {role: token for token, role in ROLES.items()}
A, B, OTHER_A = 10, 11, 20
LETTERS = {A: "a", B: "b", OTHER_A: "a"}
"""What tokens read as. A message is rendered with the first token of a letter, so the other one does not round-trip."""


def read(ids: list[int]) -> str:
    return "".join(LETTERS.get(i, "") for i in ids)


def spell(text: str | None) -> list[int]:
    return [A if letter == "a" else B for letter in text or ""]


class LetterRenderer:
    """A chat template over the tokens above. It drops the thinking of replies before the last user message."""

    def __init__(self, *, across_users: bool, attributes_replies: bool):
        self.across_users = across_users
        """Whether a bridge may keep the thinking before a new user message."""
        self.attributes_replies = attributes_replies
        """Whether it says which tokens are those of a reply that it renders again."""

    def parse_response(self, ids, tools=None, prompt_ids=None):
        printed, _, _ = self._split(ids, END)
        head, marked, rest = self._split(printed, THINK)
        thought, _, after = self._split(rest, UNTHINK)
        return SimpleNamespace(
            content=read([*head, *after]), reasoning_content=read(thought) if marked else None, tool_calls=[]
        )

    def _split(self, ids, token):
        at = ids.index(token) if token in ids else len(ids)
        return ids[:at], token in ids, ids[at + 1 :]

    def _rendered(self, messages, before, keeps_thinking):
        rows = [(token, -1, False) for token in before]
        for number, message in enumerate(messages):
            reply = message["role"] == "assistant"
            known = self.attributes_replies or not reply
            opening = [OPENS[message["role"]]]
            if reply and keeps_thinking(number) and message.get("reasoning_content") is not None:
                opening += [THINK, *spell(message["reasoning_content"]), UNTHINK]
            body = spell(message["content"])
            tokens = [*((t, False) for t in opening), *((t, known) for t in body), (END, False), (BREAK, False)]
            rows += [(token, number if known else -1, content) for token, content in tokens]
        rows.append((ASSISTANT, -1, False))
        ids, indices, content = map(list, zip(*rows, strict=True))
        roles = [message["role"] for message in messages]
        return RenderedTokens(token_ids=ids, message_indices=indices, is_content=content, message_roles=roles)

    def render(self, messages, *, tools=None, add_generation_prompt):
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return self._rendered(messages, [], lambda number: number > last)

    def bridge_to_next_turn(self, prompt, completion, tail, *, tools=None):
        roles = {message["role"] for message in tail}
        if not tail or "assistant" in roles or ("user" in roles and not self.across_users):
            return None
        closed = completion if completion[-1] == END else [*completion, END]
        return self._rendered(tail, [*prompt, *closed, BREAK], lambda number: False)


@dataclass
class Sent:
    """A model call as the server saw it."""

    prompt: list[int]
    completion: list[int]

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.completion


class World:
    """One trace in which any number of agents call the model, and the log of what was sent and sampled."""

    def __init__(self, renderer):
        task = TraceTask.model_construct(type="Toy", data=vf.TaskData(idx=0, prompt="?"), key="k", hash="h")
        self.trace = Trace(task=task, agent=AGENT)
        self.sampler = SimpleNamespace(renderer=renderer, pool=SimpleNamespace(model="policy"))
        self.log: list[Sent] = []

    def begin(self, messages: list[Message], bridges: bool = True) -> Callable[[list[int]], Message]:
        """Send a prompt. What it returns takes the completion, perhaps after other calls, and returns the reply."""
        renderer, turn = self.sampler.renderer, graph.prepare_turn(self.trace, list(messages))
        rendered = None
        if bridges and (previous := turn.previous_renderer_token_ids()) is not None:
            rendered = renderer.bridge_to_next_turn(*previous, [message_to_wire(message) for message in turn.tail])
        bridged = rendered is not None
        if rendered is None:
            rendered = renderer.render([message_to_wire(message) for message in messages], add_generation_prompt=True)

        def end(completion: list[int]) -> Message:
            number = len(self.log)
            self.log.append(Sent(list(rendered.token_ids), list(completion)))
            sampled = Completion(list(completion), [logprob(number, i) for i in range(len(completion))], "stop")
            return commit(turn, rendered, sampled, self.sampler, TimeSpan(start=0, end=1), bridged=bridged)

        return end

    def ask(self, messages: list[Message], completion: list[int], *, bridges: bool = True) -> list[Message]:
        return [*messages, self.begin(messages, bridges)(completion)]

    def rollout(self) -> Rollout:
        made = Rollout(self.trace, env_name="toy", group_id=0, start_version=0, temperature=0.7)
        made.attach_samples()
        return made


def logprob(call: int, place: int) -> float:
    """Tells every sampled token of a log from every other."""
    return -(1.0 + call + place / 1024)


def by_definition(log: list[Sent]) -> list[list[int]]:
    """The sequences as lists of call numbers. A call that sampled nothing has nothing to train and is in none."""
    sequences: list[tuple[list[int], list[int]]] = []  # tokens, calls
    for number, call in enumerate(log):
        extended = [s for s in sequences if call.prompt[: len(s[0])] == s[0]]
        if not call.completion:
            continue
        longest = max(extended, key=lambda s: len(s[0]), default=None)
        if longest is not None:
            sequences.remove(longest)
        sequences.append((call.whole, [*(longest[1] if longest else ()), number]))
    return [calls for _, calls in sequences]


def calls_of(sample) -> list[int]:
    """The numbers of the calls that a sample trains."""
    return sorted({int(-x) - 1 for x, m in zip(sample.logprobs, sample.mask, strict=True) if m})


def check(world: World) -> Rollout:
    """Everything that the definition says of the tokens."""
    rollout, trained = world.rollout(), []
    for sample, branch in zip(rollout.samples, rollout.sample_branches, strict=True):
        assert len(sample.token_ids) == len(sample.mask) == len(sample.logprobs)
        assert sample.temperatures == [0.7 if trains else 1.0 for trains in sample.mask]
        assert sample.token_ids == [t for node in branch.nodes for t in node.token_ids]
        owners = [(node, i) for node in branch.nodes for i in range(len(node.token_ids))]
        for place, (trains, value, (node, i)) in enumerate(zip(sample.mask, sample.logprobs, owners, strict=True)):
            if not trains:
                assert value == 0.0
                continue
            number, offset = int(-value) - 1, round(-value % 1 * 1024)
            call = world.log[number]
            assert place == len(call.prompt) + offset, "where it was sampled"
            assert sample.token_ids[: place + 1] == call.whole[: place + 1], "in the context it was sampled in"
            assert node.sampled and node.mask[i] and node.is_content[i] and node.message.role == "assistant"
            trained.append((number, offset))
    assert sorted(trained) == [(n, i) for n, call in enumerate(world.log) for i in range(len(call.completion))], "once"
    calls = [int(-x) - 1 if m else None for s in rollout.samples for x, m in zip(s.logprobs, s.mask, strict=True)]
    lengths = [len(call.completion) for call in world.log]
    assert [calls[turn.tokens] for turn in rollout.turns] == [[n] * length for n, length in enumerate(lengths)]
    # Calls that sent and sampled the same are one as good as the other.
    wholes = [[world.log[call].whole for call in calls_of(sample)] for sample in rollout.samples]
    assert sorted(wholes) == sorted([world.log[call].whole for call in calls] for calls in by_definition(world.log))
    return rollout


def check_provenance(rollout: Rollout) -> None:
    """Of the tokens that no call sampled: whose they are, and whether they are what was said, as the tokens tell it."""
    for sample, branch in zip(rollout.samples, rollout.sample_branches, strict=True):
        printed = [node.mask[i] for node in branch.nodes for i in range(len(node.token_ids))]
        owners = [(node, i) for node in branch.nodes for i in range(len(node.token_ids))]
        role, thinks = None, False
        for token, sampled, (node, i) in zip(sample.token_ids, printed, owners, strict=True):
            role = ROLES.get(token, role)
            thinks = token == THINK or (thinks and token != UNTHINK)
            if sampled:
                assert node.sampled and node.is_content[i]
            elif token not in LETTERS or thinks:
                assert not node.is_content[i]
            elif role != "assistant":
                assert node.is_content[i] and node.message.role == role and not node.sampled
            elif node.is_content[i]:
                assert node.message.role == "assistant" and not node.sampled, "a reply that was rendered again"


# --- random conversations ---------------------------------------------------------------------------------------------

words = st.text("ab", max_size=2)
letters = st.lists(st.sampled_from([A, B, OTHER_A]), max_size=2)
completions = st.one_of(
    letters.map(lambda ids: [*ids, END]),
    letters,  # cut off, or nothing at all
    st.tuples(letters, letters).map(lambda parts: [THINK, *parts[0], UNTHINK, *parts[1], END]),
)
observations = st.one_of(
    words.map(lambda text: UserMessage(content=text)),
    words.map(lambda text: ToolMessage(tool_call_id="c", content=text)),
)
openings = st.one_of(
    st.just([UserMessage(content="a")]),
    st.tuples(words, words).map(lambda texts: [SystemMessage(content=texts[0]), UserMessage(content=texts[1])]),
)
ACTS = ["ask"] * 5 + ["hear", "again", "change", "drop", "strip", "compact", "fork", "agent", "begin", "end"]


def play(world: World, data: st.DataObject, printed: st.SearchStrategy[list[int]]) -> None:
    """Some model calls of several agents, whose histories are changed in between."""
    agents, open_calls = [[UserMessage(content="a")]], []
    for _ in range(data.draw(st.integers(1, 9))):
        history = data.draw(st.sampled_from(agents))
        act, bridges = data.draw(st.sampled_from(ACTS)), data.draw(st.booleans())
        place = data.draw(st.integers(0, len(history) - 1))
        if act == "ask":
            history[:] = [*world.ask(history, data.draw(printed), bridges=bridges), data.draw(observations)]
        elif act == "again":
            world.ask(history, data.draw(printed), bridges=bridges)
        elif act == "hear":
            history.append(data.draw(observations))
        elif act == "change":
            history[place] = history[place].model_copy(update={"content": data.draw(words)})
        elif act == "drop" and len(history) > 1:
            del history[place]
        elif act == "strip" and history[place].role == "assistant":
            history[place] = history[place].model_copy(update={"reasoning_content": None})
        elif act == "compact":
            history[:] = [history[0], UserMessage(content=data.draw(words))]
        elif act == "fork":
            agents.append(list(history))
        elif act == "agent":
            agents.append(list(data.draw(openings)))
        elif act == "begin":
            open_calls.append((history, world.begin(history, bridges)))
        elif act == "end" and open_calls:
            history, end = open_calls.pop(data.draw(st.integers(0, len(open_calls) - 1)))
            history.append(end(data.draw(printed)))
    for _, end in open_calls:
        end(data.draw(printed))


def cases(number):
    return settings(max_examples=number, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cases(CASES["tokens of its own"])
@given(data=st.data(), across_users=st.booleans(), attributes_replies=st.booleans())
def test_any_conversation_trains_what_the_definition_says(data, across_users, attributes_replies):
    world = World(LetterRenderer(across_users=across_users, attributes_replies=attributes_replies))
    play(world, data, completions)
    check_provenance(check(world))


@pytest.fixture(scope="module")
def qwen3(tokenizer):
    """Renderers by what they retain, and completions: some of them are rendered again as other tokens."""
    from prl.engines.renderer import make_renderer

    texts = [
        "a<|im_end|>",
        "b<|im_end|>",
        "a",
        "",
        "<think>\na\n</think>\n\nb<|im_end|>",
        "<think>a</think>b<|im_end|>",
        "<think>a<|im_end|>",
        '<tool_call>\n{"name": "a", "arguments": {"b":1}}\n</tool_call><|im_end|>',
        "\n a<|im_end|>",
    ]
    return SimpleNamespace(
        renderers=[make_renderer(tokenizer, name="qwen3", **args) for args in ({}, {"thinking_retention": "all"})],
        completions=st.sampled_from([tokenizer.encode(text, add_special_tokens=False) for text in texts]),
    )


@cases(CASES["qwen3"])
@given(data=st.data())
def test_any_conversation_in_qwen3s_template_does_too(qwen3, data):
    world = World(data.draw(st.sampled_from(qwen3.renderers)))
    play(world, data, qwen3.completions)
    check(world)


# --- by name ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def world():
    return World(LetterRenderer(across_users=True, attributes_replies=True))


def user(text: str) -> UserMessage:
    return UserMessage(content=text)


def test_calls_that_break_once_are_two_samples(world):
    history = world.ask([user("a")], [A, END])
    history = world.ask([*history, user("b")], [THINK, B, UNTHINK, A, END])
    history = world.ask([*history, user("a")], [B, END])
    stripped = [m.model_copy(update={"reasoning_content": None}) if m.role == "assistant" else m for m in history]
    history = world.ask([*stripped, user("b")], [A, A, END])
    world.ask([*history, user("b")], [END])
    rollout = check(world)
    assert by_definition(world.log) == [[0, 1, 2], [3, 4]]
    assert [calls_of(sample) for sample in rollout.samples] == [[0, 1, 2], [3, 4]]
    assert [sample.token_ids for sample in rollout.samples] == [world.log[2].whole, world.log[4].whole]


def test_of_equal_sequences_the_first_is_extended(world):
    """They hold the same tokens, in one call and in two."""
    history = world.ask([user("a")], [END], bridges=False)
    history = [*history, user("")]
    world.ask(history, [END], bridges=False)
    history = world.ask(history, [END], bridges=False)
    world.ask([*history, user("")], [END], bridges=False)
    assert sorted(map(calls_of, check(world).samples)) == [[0, 1, 3], [2]]


def test_a_reply_rendered_as_other_tokens_ends_its_sample(world):
    history = world.ask([user("a")], [OTHER_A, END])
    world.ask([*history, user("b")], [B, END], bridges=False)
    assert [calls_of(sample) for sample in check(world).samples] == [[0], [1]]
    again = World(world.sampler.renderer)
    history = again.ask([user("a")], [OTHER_A, END])
    again.ask([*history, user("b")], [B, END])
    assert [calls_of(sample) for sample in check(again).samples] == [[0, 1]], "a bridge keeps them"


def test_a_call_that_sampled_nothing_is_no_step(world):
    history = world.ask([user("a")], [A, END])
    world.ask([*history, user("a")], [])
    world.ask([*history, user("b")], [B, END])
    assert [calls_of(sample) for sample in check(world).samples] == [[0, 2]]


def test_a_reply_cut_off_is_closed_by_the_template(world):
    history = world.ask([user("a")], [A])
    world.ask([*history, user("b")], [B, END])
    (sample,) = check(world).samples
    end = len(world.log[0].whole)
    assert sample.token_ids[end] == END and not sample.mask[end] and sample.mask[end - 1]


@pytest.mark.parametrize(("reply", "bridges", "samples"), [(B, True, 1), (OTHER_A, False, 16)])
def test_the_tokens_of_samples_by_the_number_of_turns(world, reply, bridges, samples):
    """They grow with it while the prefix holds, and with its square where every turn breaks it."""
    history = []
    for _ in range(16):
        history = world.ask([*history, user("a")], [reply, END], bridges=bridges)
    found = check(world).samples
    # USER a END BREAK, ASSISTANT b END; and the BREAK between two turns.
    assert [len(sample.token_ids) for sample in found] == [8 * turn - 1 for turn in range(1, 17)][-samples:]
    assert sum(sum(sample.mask) for sample in found) == 2 * 16
    if samples == 1:
        assert sum(len(node.token_ids) for node in world.trace.nodes) == 8 * 16 - 1, "each token is stored once"
