"""Kuhn poker, a game of two: one card each from J, Q, K, an ante of one chip, at most one bet of one chip.

    player    user K. check or bet?                model check    user They bet: call or fold?    model call
    opponent  user Q. They check: check or bet?    model bet

Reward of a side: (chips won + 2) / 4, so 0.5 is even. A reply that is not a legal action forfeits 2 chips. The policy
plays both sides, each against its newest self, and both are trained, or the player alone; `opponent=equilibrium` seats
a fixed opponent that plays Kuhn's equilibrium, against which 35/72 (first to act) and 37/72 (second) is the best
possible.

Source of game and equilibrium: H. W. Kuhn, "A simplified two-person poker", 1950. There is no held-out split: of the
twelve deals none can be spared. Training and evaluation differ in the opponent.
"""

import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from prl.envs.tasksets.base import IdTask

__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]

CARDS = "JQK"
OPEN, ANSWER = ("check", "bet"), ("call", "fold")

Act = Callable[[str, tuple[str, ...]], Awaitable[str]]
"""A side: (the other side's last action, empty at first; the legal actions) -> its action."""


async def play(cards: str, first: Act, second: Act) -> int:
    """Play one deal and return the chips that the first to act wins; `cards` are the first's and the second's."""
    showdown = 1 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1
    opening = await first("", OPEN)
    if opening not in OPEN:
        return -2
    reply = await second(opening, ANSWER if opening == "bet" else OPEN)
    if opening == "bet":
        return {"call": 2 * showdown, "fold": 1}.get(reply, 2)
    if reply != "bet":
        return showdown if reply == "check" else 2
    return {"call": 2 * showdown, "fold": -1}.get(await first("bet", ANSWER), -2)


def equilibrium(card: str, first: bool, rng: random.Random) -> Act:
    """Return a side that plays Kuhn's equilibrium, with a bluffing rate of 1/3."""
    bets = {"J": 1 / 3, "Q": 0.0, "K": 1.0}
    calls = {"J": 0.0, "Q": 2 / 3 if first else 1 / 3, "K": 1.0}

    async def act(_: str, legal: tuple[str, ...]) -> str:
        chances, (no, yes) = (bets, OPEN) if legal == OPEN else (calls, ("fold", "call"))
        return yes if rng.random() < chances[card] else no

    return act


class KuhnPokerData(vf.TaskData):
    cards: str
    """The card of the first to act, and the second's."""
    seat: Literal[0, 1]
    """Order of the player: 0 acts first, 1 second."""


class KuhnPokerTask(IdTask[KuhnPokerData]):
    """Cards, seat and number of the deal are its identity. Its reward is recorded where it is played."""


class KuhnPokerConfig(vf.TasksetConfig):
    num_tasks: int = Field(1000, ge=1)
    """Number of deals; the twelve that exist come in turn, in a new order each time."""
    seed: int = 0
    """Their order."""
    opponent: Literal["policy", "equilibrium"] = "policy"
    """Who plays the other side."""
    train_opponent: bool = True
    """Train on the policy's replies on the opponent's side as well."""


class KuhnPokerTaskset(vf.Taskset[KuhnPokerTask, KuhnPokerConfig]):
    """Deals of two of the three cards, with the player in either seat."""

    IN_PROCESS = True

    def load(self) -> Iterator[KuhnPokerTask]:
        config, rng = self.config, random.Random(self.config.seed)
        deals = [(a + b, seat) for a, b in itertools.permutations(CARDS, 2) for seat in (0, 1)]
        for number in range(config.num_tasks):
            if number % len(deals) == 0:
                rng.shuffle(deals)
            cards, seat = deals[number % len(deals)]
            data = KuhnPokerData(id=f"{cards}{seat}-{number}", prompt=f"{cards[seat]}.", cards=cards, seat=seat)
            yield KuhnPokerTask(data, config.task)


class KuhnPokerEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(sampling=vf.SamplingConfig(max_tokens=16))
    opponent: vf.AgentConfig = vf.AgentConfig(sampling=vf.SamplingConfig(max_tokens=16))


class KuhnPokerEnv(vf.Env[KuhnPokerEnvConfig]):
    async def setup(self, agents):
        config = self.taskset.config
        agents.opponent.trainable = config.opponent == "policy" and config.train_opponent

    async def run(self, task, agents):
        cards, seated = task.data.cards, {task.data.seat: agents.player}
        if self.taskset.config.opponent == "policy":
            seated[1 - task.data.seat] = agents.opponent
        # A side sees its own card only: the task's prompt, which shows the player's, is left out.
        unseen = task.with_data(prompt=None)
        async with contextlib.AsyncExitStack() as table:
            talks = {seat: await table.enter_async_context(side.interaction(unseen)) for seat, side in seated.items()}
            sides = [
                _speaking(talks[seat], cards[seat])
                if seat in talks
                else equilibrium(cards[seat], seat == 0, random.Random(task.data.id))
                for seat in (0, 1)
            ]
            won = await play(cards, *sides)
            for seat, talk in talks.items():
                talk.trace.record_reward("chips", (2 + won) / 4 if seat == 0 else (2 - won) / 4)


def _speaking(talk, card: str) -> Act:
    """Return a side whose actions are the model's turns in a conversation."""
    opening = f"{card}. "

    async def act(seen: str, legal: tuple[str, ...]) -> str:
        nonlocal opening
        words = " or ".join(legal) + "?"
        question = opening + (f"They {seen}: {words}" if seen else words)
        opening = ""  # once
        return (await talk.turn(question)).last_reply

    return act
