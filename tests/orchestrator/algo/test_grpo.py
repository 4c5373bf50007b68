"""grpo's credit by hand, and its length penalty on what real conversations cost."""

import pytest

from prl.orchestrator.algo.grpo import GRPOAlgorithm


@pytest.fixture
def grpo():
    return GRPOAlgorithm()


def penalised(by, **weights):
    return GRPOAlgorithm(length_penalty=by, **weights)


@pytest.fixture
def asks_a_tool(new_talk, user, tool, call):
    """A rollout of two turns: a call, what the tool said, and an answer."""

    def make(reward, said, answer="4"):
        talk = new_talk()
        talk.turn([*talk.turn([user("2+2=")], call), tool(said)], answer)
        return talk.rollout(reward)

    return make


async def test_grpo_credit_the_reward_minus_the_mean_of_the_group(grpo, make_rollout, credit):
    group = [make_rollout(reward) for reward in (1.0, 0.0, 0.0, 1.0, 0.5)]
    await grpo.finalize_group(group)
    assert [credit(rollout) for rollout in group] == [0.5, -0.5, -0.5, 0.5, 0.0]


async def test_grpo_ships_no_weight_streams(grpo, make_rollout):
    rollout = make_rollout(1.0)
    await grpo.finalize_group([rollout, make_rollout(0.0)])
    (sample,) = rollout.samples
    assert sample.rl_weights is sample.ce_weights is sample.ref_kl_weights is sample.ref_logprobs is None


@pytest.mark.parametrize("rewards", [(0.7,), (0.7,) * 3, (0.1,) * 8])
async def test_grpo_gives_a_group_of_one_and_a_group_of_equals_nothing(grpo, make_rollout, credit, rewards):
    group = [make_rollout(reward) for reward in rewards]
    await grpo.finalize_group(group)
    assert all(credit(rollout) == 0.0 and rollout.advantages is not None for rollout in group)


async def test_grpo_measures_survivors_against_survivors(grpo, make_rollout, credit):
    group = [make_rollout(1.0), make_rollout(0.0), make_rollout(9.0, error="ValueError: no")]
    await grpo.finalize_group(group)
    assert [credit(rollout) for rollout in group[:2]] == [0.5, -0.5]
    assert group[2].advantages is None and group[2].samples[0].advantages is None


async def test_the_penalty_is_off_by_default(grpo, answers, credit, play):
    group = await play(grpo, [answers(1.0, "4"), answers(1.0, "4" * 30), answers(0.0, "5")])
    assert [credit(rollout) for rollout in group] == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def test_a_rollouts_cost_counts_the_sampled_tokens_and_the_bodies_that_tools_answered(asks_a_tool, talk, call):
    rollout = asks_a_tool(1.0, "it is four", "yes")
    sampled = len(talk.encode(call)) + len("yes") + 2  # one token a byte; each turn ends with <|im_end|>
    assert rollout.num_completion_tokens == sampled == sum(map(sum, (s.mask for s in rollout.samples)))
    assert rollout.num_tool_response_tokens == len("it is four")
    assert rollout.num_turns == 2


def test_where_the_renderer_does_not_attribute_content_a_tools_whole_span_counts(asks_a_tool):
    rollout = asks_a_tool(1.0, "it is four")
    (node,) = [node for node in rollout.nodes if node.message.role == "tool"]
    node.is_content = []
    assert rollout.num_tool_response_tokens == len(node.token_ids) > len("it is four")


def test_a_user_who_answers_is_no_tool(talk, user):
    talk.turn([*talk.turn([user("2+2=")], "5"), user("no")], "4")
    assert talk.rollout().num_tool_response_tokens == 0


async def test_the_penalty_by_tokens_favours_the_cheaper_of_the_correct(answers, credit, play):
    group = [answers(1.0, "4" * 9), answers(1.0, "4" * 29), answers(0.0, "5")]  # 10 and 30 tokens: m = 20
    assert [r.num_completion_tokens for r in group] == [10, 30, 2]
    await play(penalised("tokens"), group)
    assert [credit(r) for r in group] == pytest.approx([1.5 - 2.5 / 3, 1.0 - 2.5 / 3, 0.0 - 2.5 / 3])


@pytest.mark.parametrize(("completion", "response"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, 2.0), (0.0, 0.0)])
async def test_both_kinds_of_token_have_their_weight(asks_a_tool, answers, credit, play, completion, response):
    group = [asks_a_tool(1.0, "x" * 40), answers(1.0, "4" * 70), answers(0.0, "5")]
    grpo = penalised("tokens", completion_weight=completion, tool_response_weight=response)
    first = completion * group[0].num_completion_tokens + response * 40
    second = completion * 71
    m = (first + second) / 2
    shaped = [1 + max(0.0, 1 - cost / m) if m else 1.0 for cost in (first, second)] + [0.0]
    await play(grpo, group)
    expected = [s - sum(shaped) / 3 for s in shaped]
    assert [credit(r) for r in group] == pytest.approx(expected)
    assert len(set(expected[:2])) == (1 if m == 0 else 2), "the case tells the weights apart"


async def test_the_penalty_by_turns_counts_turns_and_no_tokens(asks_a_tool, answers, credit, play):
    group = [asks_a_tool(1.0, "x"), answers(1.0, "4" * 200), answers(0.5, "4")]  # two turns, one, one: m = 1.5
    await play(penalised("turns", completion_weight=9.0), group)
    shaped = [1.0, 1 + 1 / 3, 0.5]
    assert [credit(r) for r in group] == pytest.approx([s - sum(shaped) / 3 for s in shaped])


async def test_rollouts_that_failed_have_no_part_in_the_mean_cost(answers, credit, play):
    group = [answers(1.0, "4" * 9), answers(1.0, "4" * 29), answers(5.0, "4" * 999)]
    group[2].fail(ValueError("no"))
    await play(penalised("tokens"), group)
    assert [credit(r) for r in group[:2]] == [0.25, -0.25] and group[2].advantages is None


async def test_equally_cheap_equals_get_exactly_nothing(answers, credit, play):
    group = await play(penalised("tokens"), [answers(0.1, "4") for _ in range(8)])
    assert all(credit(rollout) == 0.0 for rollout in group)
