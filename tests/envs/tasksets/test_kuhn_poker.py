"""kuhn_poker: every course of the game by hand, the equilibrium by brute force, two sides that see their own card."""

import itertools
from fractions import Fraction

import pytest

from prl.config.schema import EnvConfig
from prl.envs.environment import Environment
from prl.envs.tasksets.kuhn_poker import ANSWER, CARDS, OPEN, KuhnPokerConfig, KuhnPokerTaskset, equilibrium, play

DEALS = ["".join(pair) for pair in itertools.permutations(CARDS, 2)]
BETTER = {"KQ", "KJ", "QJ"}  # deals in which the first to act has the better card


def tasks(**options):
    return list(KuhnPokerTaskset(KuhnPokerConfig(**options)))


def says(*actions):
    """A side that does these things in turn, and what it was told."""
    rest, told = iter(actions), []

    async def act(seen, legal):
        told.append((seen, legal))
        return next(rest)

    act.told = told
    return act


# --- the game ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cards", DEALS)
@pytest.mark.parametrize(
    ("first", "second", "with_better", "with_worse"),
    [
        (["check"], ["check"], 1, -1),
        (["check", "fold"], ["bet"], -1, -1),
        (["check", "call"], ["bet"], 2, -2),
        (["bet"], ["fold"], 1, 1),
        (["bet"], ["call"], 2, -2),
    ],
)
async def test_every_course_of_the_game_pays_what_it_should(cards, first, second, with_better, with_worse):
    one, two = says(*first), says(*second)
    assert await play(cards, one, two) == (with_better if cards in BETTER else with_worse)
    assert one.told == [("", OPEN), ("bet", ANSWER)][: len(first)]
    assert two.told == [(first[0], ANSWER if first[0] == "bet" else OPEN)]


ILLEGAL = ["", "raise", "Check", "check.", "I bet", "all in"]


@pytest.mark.parametrize("cards", ["KJ", "JK"])
@pytest.mark.parametrize(
    ("first", "second", "won"),
    [
        *(([bad], [], -2) for bad in [*ILLEGAL, "call", "fold"]),
        *((["check"], [bad], 2) for bad in [*ILLEGAL, "call", "fold"]),
        *((["bet"], [bad], 2) for bad in [*ILLEGAL, "check", "bet"]),
        *((["check", bad], ["bet"], -2) for bad in [*ILLEGAL, "check", "bet"]),
    ],
)
async def test_illegal_move_forfeits_two_chips_whatever_the_cards(cards, first, second, won):
    assert await play(cards, says(*first), says(*second)) == won


# --- the equilibrium --------------------------------------------------------------------------------------------------


class Grid:
    """Numbers between 0 and 1 that hit each sixth of the range alike: all chances of the equilibrium are thirds."""

    def __init__(self, draws):
        self.draws = iter(draws)

    def random(self):
        return (next(self.draws) + 0.5) / 6


async def earns(actions, seat):
    """Chips of a pure strategy against the equilibrium, on average: `actions[card, what the other did]`."""
    total = Fraction(0)
    for cards in DEALS:
        for draws in itertools.product(range(6), repeat=2):
            opponent = equilibrium(cards[1 - seat], seat == 1, Grid(draws))

            async def player(seen, legal, card=cards[seat]):
                return actions[card, seen]

            sides = (player, opponent) if seat == 0 else (opponent, player)
            total += await play(cards, *sides) * (1 if seat == 0 else -1)
    return total / (len(DEALS) * 36)


@pytest.mark.parametrize(("seat", "best"), [(0, Fraction(-1, 18)), (1, Fraction(1, 18))])
async def test_no_strategy_beats_the_equilibrium(seat, best):
    seen = {"": OPEN, "bet": ANSWER} if seat == 0 else {"check": OPEN, "bet": ANSWER}
    spots = [(card, what) for card in CARDS for what in seen]
    earned = []
    for choice in itertools.product(*(seen[what] for _, what in spots)):
        earned.append(await earns(dict(zip(spots, choice, strict=True)), seat))
    assert len(earned) == 64 and max(earned) == best > min(earned)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_twelve_deals_come_equally_often_in_new_orders():
    drawn = [(task.data.cards, task.data.seat) for task in tasks(num_tasks=120, seed=4)]
    rounds = [drawn[at : at + 12] for at in range(0, 120, 12)]
    assert all(task.data.prompt == f"{task.data.cards[task.data.seat]}." for task in tasks(num_tasks=60))
    assert len({task.key for task in tasks(num_tasks=60)}) == 60
    assert all(sorted(deals) == sorted((cards, seat) for cards in DEALS for seat in (0, 1)) for deals in rounds)
    assert len({tuple(deals) for deals in rounds}) == 10
    assert drawn == [(task.data.cards, task.data.seat) for task in tasks(num_tasks=120, seed=4)]
    assert drawn != [(task.data.cards, task.data.seat) for task in tasks(num_tasks=120, seed=5)]


# --- played -----------------------------------------------------------------------------------------------------------


def environment(eval_args=None, **args):
    config = EnvConfig(taskset="prl.envs.tasksets.kuhn_poker", args={"num_tasks": 24, **args}, eval_args=eval_args)
    return Environment("kuhn", config, eval_tasks=12)


def by_side(**actions):
    """A script by agent: what it says in each of its turns."""
    return lambda conversation, turn: actions[conversation.split("/")[-2]][turn]


def deal(env, cards, seat):
    return next(task for task in env.tasks if (task.data.cards, task.data.seat) == (cards, seat))


THEY_BET = "They bet: call or fold?"


def of_the_user(rollout):
    return [message.content for message in rollout.trace.messages if message.role == "user"]


@pytest.mark.parametrize(
    ("cards", "seat", "player", "opponent", "chips", "to_player", "to_opponent"),
    [
        ("KJ", 0, ["bet"], ["call"], 2, ["K. check or bet?"], ["J. They bet: call or fold?"]),
        ("KJ", 1, ["call"], ["bet"], -2, ["J. They bet: call or fold?"], ["K. check or bet?"]),
        ("JQ", 0, ["check", "fold"], ["bet"], -1, ["J. check or bet?", THEY_BET], ["Q. They check: check or bet?"]),
        ("JQ", 1, ["bet"], ["check", "call"], 2, ["Q. They check: check or bet?"], ["J. check or bet?", THEY_BET]),
        ("QJ", 1, ["raise"], ["check"], -2, ["J. They check: check or bet?"], ["Q. check or bet?"]),
    ],
)
async def test_both_sides_train_and_see_only_their_own_card(
    scripted, cards, seat, player, opponent, chips, to_player, to_opponent
):
    env = environment()
    sampler = scripted(by_side(player=player, opponent=opponent))
    async with env.serving():
        assert env.seats == 2
        mine, theirs = await env.play(deal(env, cards, seat), 1, sampler, group_id=0)
    assert (mine.error, theirs.error) == (None, None) and mine.samples and theirs.samples
    assert [mine.agent.name, theirs.agent.name] == ["player", "opponent"]
    assert (mine.reward, theirs.reward) == ((2 + chips) / 4, (2 - chips) / 4)
    assert (of_the_user(mine), of_the_user(theirs)) == (to_player, to_opponent)
    for name, prompts in sampler.asked.items():
        card = cards[seat] if "/player/" in name else cards[1 - seat]
        assert set(sampler.tokenizer.decode(prompts[-1])) & set(CARDS) == {card}


async def test_evaluation_is_against_the_equilibrium_whoever_one_trains_against(scripted, monkeypatch):
    seated = []
    monkeypatch.setattr(
        "prl.envs.tasksets.kuhn_poker.equilibrium", lambda *who: seated.append(who[:2]) or equilibrium(*who)
    )
    env = environment(eval_args={"opponent": "equilibrium"})
    sampler = scripted(lambda conversation, turn: "call" if turn else "check")
    async with env.serving():
        played = [await env.play(task, 2, sampler, group_id=i, held_out=True) for i, task in enumerate(env.eval_tasks)]
    assert {rollout.agent.name for group in played for rollout in group} == {"player"}
    assert seated == [(t.data.cards[1 - t.data.seat], t.data.seat == 1) for t in env.eval_tasks for _ in range(2)]
    assert all("/player/" in name for name in sampler.asked), "nobody else is asked"
    for task, (one, two) in zip(env.eval_tasks, played, strict=True):
        assert one.error is two.error is None and one.reward == two.reward, "a deal's opponent plays the same each time"
        if task.data.cards == "KJ" and task.data.seat == 0:
            assert one.reward in (0.75, 1.0), "a king checked: the jack checks or bluffs"
        if task.data.cards == "JK" and task.data.seat == 0:
            assert one.reward == 0.0, "the king bets and is called"
