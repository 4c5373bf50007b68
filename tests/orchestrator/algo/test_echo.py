"""echo on real conversations: whose words train, token by token, and that nothing else does."""

import logging

import pytest

from prl.orchestrator.algo.echo import EchoAlgorithm
from prl.orchestrator.filters.zero_advantage import ZeroAdvantage
from prl.rollouts.rollout import Rollout


def echo(**alphas):
    roles = {role: {"alpha": alpha} for role, alpha in alphas.items()}
    return EchoAlgorithm(roles=roles)


@pytest.fixture
def system():
    import verifiers.v1 as vf

    return lambda text: vf.SystemMessage(content=text)


@pytest.fixture
def said():
    """A message of the assistant's that the model never sampled."""
    import verifiers.v1 as vf

    return lambda text: vf.AssistantMessage(content=text)


@pytest.fixture
def long_talk(talk, system, user, tool, said, call):
    """Every role before the first model turn and after it; four turns of the model's."""
    opening = [system("Be brief."), user("example"), said("given"), tool("a given result"), user("What is at 1?")]
    messages = talk.turn(opening, "I look.\n" + call)
    messages = talk.turn([*messages, tool("a\nlamp é"), tool("second", "call_1")], "A lamp.")
    messages = talk.turn([*messages, user("Sure?"), said("Prefilled."), system("Hurry.")], call)
    talk.turn([*messages, tool("a shoe"), user("So?")], "A shoe.")
    return talk


BODIES = {
    "tool": ["a\nlamp é", "second", "a shoe"],
    "user": ["Sure?", "So?"],
    "system": ["Hurry."],
    "assistant": ["Prefilled.<|im_end|>"],  # an end of turn is the assistant's own, not the template's
}
ORDER = ["a\nlamp é", "second", "Sure?", "Prefilled.<|im_end|>", "Hurry.", "a shoe", "So?"]


@pytest.mark.parametrize("role", BODIES)
async def test_the_bodies_of_a_role_train_after_the_first_model_turn_and_nothing_else(long_talk, play, role):
    (rollout,) = await play(echo(**{role: 0.3}), [long_talk.rollout()])
    (sample,) = rollout.samples
    assert long_talk.spans(sample) == [(0.3, text) for text in BODIES[role]]


async def test_several_roles_train_each_at_its_own_alpha(long_talk, play):
    alphas = {"tool": 0.1, "user": 0.05, "system": 2.0, "assistant": 0.7}
    (rollout,) = await play(echo(**alphas), [long_talk.rollout()])
    role_of = {text: role for role, texts in BODIES.items() for text in texts}
    assert long_talk.spans(rollout.samples[0]) == [(alphas[role_of[text]], text) for text in ORDER]


async def test_the_default_is_the_tools_at_a_tenth_and_naming_a_role_replaces_it(long_talk, play):
    assert EchoAlgorithm().alphas == {"tool": 0.1}
    (rollout,) = await play(EchoAlgorithm(), [long_talk.rollout()])
    assert long_talk.spans(rollout.samples[0]) == [(0.1, text) for text in BODIES["tool"]]
    assert EchoAlgorithm(roles={"user": {"alpha": 0.05}}).alphas == {"user": 0.05}


async def test_sampled_tokens_never_feed_ce_and_the_rl_mask_is_untouched(long_talk, play):
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


async def test_credit_is_grpos(long_talk, make_rollout, play):
    rollout, other = long_talk.rollout(1.0), make_rollout(0.0)
    other.sample_branches = rollout.sample_branches
    await echo(tool=0.1).finalize_group([rollout, other])
    assert rollout.advantages == [0.5 * trains for trains in rollout.samples[0].mask]


async def test_one_turn_has_no_observations_and_ships_no_stream(talk, user, play):
    talk.turn([user("2+2=")], "4")
    (rollout,) = await play(echo(user=0.1, tool=0.1), [talk.rollout()])
    assert rollout.samples[0].ce_weights is None


async def test_a_message_on_two_branches_trains_on_the_first_of_them_only(talk, user, tool, call, play):
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
async def test_two_agents_and_two_replies_that_are_answered_the_same_both_train(talk, user, tool, call, play, openings):
    for number, opening in enumerate(openings):
        asked = talk.turn([user(opening)], f"Try {number}.\n{call}")
        talk.turn([*asked, tool("ok")], "Done.")
    (rollout,) = await play(echo(tool=0.1), [talk.rollout()])
    assert [talk.spans(sample) for sample in rollout.samples] == [[(0.1, "ok")]] * 2
    assert rollout.num_tool_response_tokens == 2 * len(talk.encode("ok"))


async def test_each_rollout_trains_its_own_copy_of_the_same_words(new_talk, user, tool, call, play):
    talks = [new_talk(), new_talk()]
    for talk in talks:
        talk.turn([*talk.turn([user("?")], call), tool("a lamp")], "A lamp.")
    group = await play(echo(tool=0.1), [talk.rollout() for talk in talks])
    assert [talk.spans(rollout.samples[0]) for talk, rollout in zip(talks, group, strict=True)] == [
        [(0.1, "a lamp")]
    ] * 2


async def test_without_attribution_whole_messages_train_and_one_warning_says_so(
    new_talk, user, tool, call, play, caplog
):
    algorithm, talks = echo(tool=0.1), [new_talk() for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        for talk in talks:
            messages = talk.turn([*talk.turn([user("?")], call), tool("a lamp")], call)
            talk.turn([*messages, tool("a shoe")], "Done.")
            for node in talk.trace.nodes:
                node.is_content = []
        rollouts = await play(algorithm, [talk.rollout() for talk in talks])
    tools = [node for node in talks[0].trace.nodes if node.message.role == "tool"]
    spans = [(0.1, talks[0].tokenizer.decode(node.token_ids)) for node in tools]
    assert all("a lamp" in text or "a shoe" in text for _, text in spans) and "<tool_response>" in spans[0][1]
    for talk, rollout in zip(talks, rollouts, strict=True):
        assert talk.spans(rollout.samples[0]) == spans
    assert [record.message for record in caplog.records if "echo" in record.message] == [
        "echo: this renderer does not tell a message's body from its template: whole messages are trained on"
    ]


async def test_with_attribution_there_is_no_warning(long_talk, play, caplog):
    with caplog.at_level(logging.WARNING):
        await play(echo(tool=0.1), [long_talk.rollout()])
    assert not [record for record in caplog.records if "echo" in record.message]


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
async def test_three_steps_without_an_observation_that_trains_warn_once_with_the_roles_there_are(
    steps, asks_twice, who, roles
):
    assert await steps(echo(tool=0.1, system=0.1), [[asks_twice(who)]] * 2) == []
    (said,) = await steps(echo(tool=0.1, system=0.1), [[asks_twice(who)] * 2] * 8)
    assert said == (
        "env toy: echo has trained no observation in 3 steps: algo.roles has tool, system; after the model's first "
        f"turn the env has messages of the roles: {roles}"
    )


async def test_one_observation_in_three_steps_is_enough(steps, asks_twice):
    seldom = [[asks_twice(None)], [asks_twice(None)], [asks_twice(None), asks_twice("tool")]] * 3
    assert await steps(echo(tool=0.1), seldom) == []
    assert await steps(echo(tool=0.1), [[], [], [], []]) == [], "batches of other envs"


async def test_a_filter_that_keeps_nothing_is_named(steps, asks_twice):
    algorithm = EchoAlgorithm(filter=lambda rollout: [[False] * len(b.token_ids) for b in rollout.branches])
    (said,) = await steps(algorithm, [[asks_twice("tool")]] * 3)
    assert "algo.roles has tool, narrowed by algo.filter; " in said and said.endswith("roles: tool")


async def test_the_zero_advantage_filter_keeps_what_observations_teach(new_talk, user, tool, call, play):
    observed, silent = new_talk(), new_talk()
    observed.turn([*observed.turn([user("?")], call), tool("a lamp")], "A lamp.")
    silent.turn([user("?")], "A lamp.")
    group: list[Rollout] = [observed.rollout(0.5), silent.rollout(0.5)]
    await play(echo(tool=0.1), group)
    assert not any(any(rollout.advantages) for rollout in group)
    assert [ZeroAdvantage().matches(rollout) for rollout in group] == [False, True]
