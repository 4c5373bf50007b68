"""echo on real conversations: whose words train, token by token, and that nothing else does."""

import functools
import logging

import pytest

from prl.algorithms.echo import EchoAlgorithm


def echo(**alphas):
    roles = {role: {"alpha": alpha} for role, alpha in alphas.items()}
    return EchoAlgorithm(roles=roles)


@pytest.fixture
def system():
    import verifiers.v1 as vf

    return lambda text: vf.SystemMessage(content=text)


@pytest.fixture
def prefilled():
    """A message of the assistant's that the model never sampled."""
    import verifiers.v1 as vf

    return lambda text: vf.AssistantMessage(content=text)


@pytest.fixture
def long_talk(talk, system, user, tool, prefilled, call):
    """Every role before the first model turn and after it; four turns of the model's."""
    opening = [system("Be brief."), user("example"), prefilled("given"), tool("a given result"), user("What is at 1?")]
    messages = talk.turn(opening, "I look.\n" + call)
    messages = talk.turn([*messages, tool("a\nlamp é"), tool("second", "call_1")], "A lamp.")
    messages = talk.turn([*messages, user("Sure?"), prefilled("Prefilled."), system("Hurry.")], call)
    talk.turn([*messages, tool("a shoe"), user("So?")], "A shoe.")
    return talk


BODIES = {
    "tool": ["a\nlamp é", "second", "a shoe"],
    "user": ["Sure?", "So?"],
    "system": ["Hurry."],
    "assistant": ["Prefilled.<|im_end|>"],  # an end of turn is the assistant's own, not the template's
}
ORDER = ["a\nlamp é", "second", "Sure?", "Prefilled.<|im_end|>", "Hurry.", "a shoe", "So?"]


async def test_several_roles_train_each_at_its_own_alpha(long_talk, play):
    alphas = {"tool": 0.1, "user": 0.05, "system": 2.0, "assistant": 0.7}
    (rollout,) = await play(echo(**alphas), [long_talk.rollout()])
    role_of = {text: role for role, texts in BODIES.items() for text in texts}
    assert long_talk.spans(rollout.samples[0]) == [(alphas[role_of[text]], text) for text in ORDER]


async def test_sampled_tokens_never_feed_ce(long_talk, play):
    before = [list(sample.mask) for sample in long_talk.rollout(0.0).samples]
    rollout = long_talk.rollout(0.0)
    everybody = echo(tool=1.0, user=1.0, system=1.0, assistant=1.0)
    await play(everybody, [rollout])
    (sample,) = rollout.samples
    assert [sample.mask] == before and sample.rl_weights is None
    assert sum(sample.mask) == rollout.num_completion_tokens > 20
    assert not any(weight for weight, trains in zip(sample.ce_weights, sample.mask, strict=True) if trains)
    trained = "".join(text for _, text in long_talk.spans(sample))
    assert sum(map(bool, sample.ce_weights)) == len(long_talk.encode(trained))


async def test_message_on_two_branches_trains_once(talk, user, tool, call, play):
    shared = [*talk.turn([user("What is at 1?")], call), tool("a lamp")]
    first = talk.turn(shared, "A lamp.")
    second = talk.turn(shared, "One lamp.")
    talk.turn([*first, user("Sure?")], "Yes.")
    talk.turn([*second, user("Why?")], "See.")
    (rollout,) = await play(echo(tool=0.1, user=0.2), [talk.rollout()])
    one, two = rollout.samples
    assert talk.spans(one) == [(0.1, "a lamp"), (0.2, "Sure?")]
    assert talk.spans(two) == [(0.2, "Why?")]
    assert one.token_ids[:40] == two.token_ids[:40], "the branches share a prefix"


@pytest.mark.parametrize("openings", [["Agent one.", "Agent two."], ["The same."] * 2])
async def test_equal_answers_on_separate_branches_both_train(talk, user, tool, call, play, openings):
    for number, opening in enumerate(openings):
        asked = talk.turn([user(opening)], f"Try {number}.\n{call}")
        talk.turn([*asked, tool("ok")], "Done.")
    (rollout,) = await play(echo(tool=0.1), [talk.rollout()])
    assert [talk.spans(sample) for sample in rollout.samples] == [[(0.1, "ok")]] * 2
    assert rollout.num_tool_response_tokens == 2 * len(talk.encode("ok"))


@pytest.fixture
def steps(play, caplog):
    """`steps(algorithm, batches)`: what is warned of while these batches are trained, each a list of conversations."""

    async def run(algorithm, batches):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for batch in batches:
                algorithm.observe_batch(await play(algorithm, [talk.rollout() for talk in batch]))
        return [record.message for record in caplog.records]

    return run


@pytest.fixture
def asks_twice(new_talk, user, tool, call):
    """A conversation in which the user says more after the model's first turn, or nothing, or a tool does."""

    def make(who):
        talk = new_talk()
        messages = talk.turn([user("2+2=")], call)
        if who is not None:
            talk.turn([*messages, user("Sure?") if who == "user" else tool("four")], "4")
        return talk

    return make


@pytest.mark.parametrize(("who", "roles"), [("user", "user"), (None, "none")])
async def test_three_steps_without_an_observation_warn_once(steps, asks_twice, who, roles):
    assert await steps(echo(tool=0.1, system=0.1), [[asks_twice(who)]] * 2) == []
    (message,) = await steps(echo(tool=0.1, system=0.1), [[asks_twice(who)] * 2] * 8)
    assert message == (
        "env toy: echo has trained no observation in 3 steps: algo.roles has tool, system; after the model's first "
        f"turn the env has messages of the roles: {roles}"
    )


async def test_one_observation_in_three_steps_is_enough(steps, asks_twice):
    seldom = [[asks_twice(None)], [asks_twice(None)], [asks_twice(None), asks_twice("tool")]] * 3
    assert await steps(echo(tool=0.1), seldom) == []
    assert await steps(echo(tool=0.1), [[], [], [], []]) == [], "batches of other envs"


# --- history that is rendered again

THINK = "<think>\nhm\n</think>\n\n"


@pytest.fixture
def broken_prefix(talk, user, tool, call):
    """The template drops past thinking once a user speaks: the last turn starts a branch of its own."""
    messages = talk.turn([user("u0")], call)
    messages = talk.turn([*messages, tool("first tool")], THINK + call)
    messages = talk.turn([*messages, tool("second tool")], "done")
    talk.turn([*messages, user("u1")], "again")
    return talk


def test_tool_answer_rendered_again_costs_once(broken_prefix):
    rollout, encode = broken_prefix.rollout(), broken_prefix.tokenizer.encode
    assert len(rollout.samples) == 2
    assert rollout.num_tool_response_tokens == len(encode("first tool")) + len(encode("second tool"))


async def test_message_rendered_again_trains_once(broken_prefix, play):
    roles = {"tool": {"alpha": 0.1}, "user": {"alpha": 0.1}, "assistant": {"alpha": 0.5}}
    (rollout,) = await play(EchoAlgorithm(roles=roles), [broken_prefix.rollout()])
    trained = [text for sample in rollout.samples for _, text in broken_prefix.spans(sample)]
    assert sorted(trained) == ["first tool", "second tool", "u1"], "and never on the model's own words"


async def test_filter_may_leave_a_message_to_a_later_branch(talk, user, tool, call, play):
    shared = [*talk.turn([user("?")], call), tool("lamp")]
    talk.turn(shared, "A")
    talk.turn(shared, "B")

    def keep(rollout):
        return [[branch.index == 1] * len(branch.token_ids) for branch in rollout.branches]

    (rollout,) = await play(EchoAlgorithm(filter=keep), [talk.rollout()])
    assert [talk.spans(sample) for sample in rollout.samples] == [[], [(0.1, "lamp")]]


# --- the filter


@pytest.fixture
def forked(talk, user, tool, call):
    """Two branches, each with a tool's message of its own."""
    start = [user("Where?")]
    for found in ("a lamp", "a shoe"):
        messages = talk.turn(start, f"I look for {found}.\n{call}")
        talk.turn([*messages, tool(found)], "Found.")
    return talk


def everything(rollout):
    return [[True] * len(branch.token_ids) for branch in rollout.branches]


async def test_filter_narrows_token_by_token(forked, play):
    def keep(rollout, *, drop):
        return [[token != drop for token in branch.token_ids] for branch in rollout.branches]

    (letter,) = forked.encode("a")
    (rollout,) = await play(EchoAlgorithm(filter=functools.partial(keep, drop=letter)), [forked.rollout()])
    assert [forked.spans(sample) for sample in rollout.samples] == [[(0.1, " l"), (0.1, "mp")], [(0.1, " shoe")]]


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (lambda one, two: [one], "one keep-mask per trainable branch: 2, got 1"),
        (lambda one, two: [one, two, two], "one keep-mask per trainable branch: 2, got 3"),
        (lambda one, two: None, "one keep-mask per trainable branch: 2, got a NoneType"),
        (lambda one, two: [one, two[1:]], "the keep-mask of branch 1 must span the branch's tokens"),
        (lambda one, two: [one, True], "the keep-mask of branch 1 must span the branch's tokens"),
    ],
)
async def test_filter_that_returns_other_masks_is_refused(forked, play, masks, message):
    with pytest.raises(ValueError, match=message):
        await play(EchoAlgorithm(filter=lambda rollout: masks(*everything(rollout))), [forked.rollout()])


async def test_without_attribution_whole_messages_train_with_one_warning(long_talk, play, caplog):
    for node in long_talk.trace.nodes:
        node.is_content = []
    rollouts = await play(EchoAlgorithm(), [long_talk.rollout(), long_talk.rollout()])
    tools = [node for node in long_talk.trace.nodes if node.message.role == "tool"][1:]
    spans = "".join(text for _, text in long_talk.spans(rollouts[1].samples[0]))
    assert spans == "".join(long_talk.tokenizer.decode(node.token_ids) for node in tools)
    assert "<tool_response>" in spans and caplog.text.count("echo: this renderer does not tell") == 1


def test_default_trains_tools_at_a_tenth():
    assert EchoAlgorithm().chosen == {"tool": {"alpha": 0.1}}
    assert EchoAlgorithm(roles={"user": {"alpha": 0.05}}).chosen == {"user": {"alpha": 0.05}}


def calls(*names):
    return "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in names)


def only(*names):
    return EchoAlgorithm(roles={"tool": {"alpha": 0.1, "tool_names": list(names)}, "user": {"alpha": 0.2}})


@pytest.fixture
def two_tools(talk, user):
    """A conversation with answers of `look`, by the call's id or by the answer's own name, and one of `take`."""
    import verifiers.v1 as vf

    def answer(text, call, name=None):
        return vf.ToolMessage(tool_call_id=call, content=text, name=name)

    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "take")]
    messages = talk.turn([user("What is there?")], calls("look", "take"), tools=tools)
    first, second = (call.id for call in messages[-1].tool_calls)
    messages = talk.turn([*messages, answer("a lamp", first), answer("taken", second)], calls("take"), tools=tools)
    (again,) = (call.id for call in messages[-1].tool_calls)
    talk.turn([*messages, answer("no more", again), answer("a shoe", "unknown", "look"), user("So?")], "A shoe.")
    return talk


@pytest.mark.parametrize(
    ("names", "trained"),
    [
        (["look"], [(0.1, "a lamp"), (0.1, "a shoe"), (0.2, "So?")]),
        (["take"], [(0.1, "taken"), (0.1, "no more"), (0.2, "So?")]),
        (["look", "take"], [(0.1, "a lamp"), (0.1, "taken"), (0.1, "no more"), (0.1, "a shoe"), (0.2, "So?")]),
        (["open"], [(0.2, "So?")]),
    ],
)
async def test_only_the_answers_of_named_tools_train(two_tools, play, names, trained):
    (rollout,) = await play(only(*names), [two_tools.rollout()])
    assert [span for sample in rollout.samples for span in two_tools.spans(sample)] == trained


async def test_the_warning_names_the_tools_that_there_are(steps, two_tools):
    algorithm = EchoAlgorithm(roles={"tool": {"alpha": 0.1, "tool_names": ["lok"]}})
    (message,) = await steps(algorithm, [[two_tools]] * 3)
    assert "algo.roles has tool (lok)" in message and message.endswith("tool (look), tool (take), user")
