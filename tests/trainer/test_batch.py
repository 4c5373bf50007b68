"""Packed rows stacked into tensors."""

import math

import msgspec
import pytest
import torch

from prl.rollouts.components import STREAM_FILL
from prl.rollouts.packing import pack_row
from prl.trainer.batch import stacks

CPU = torch.device("cpu")


def one_stack(rows, tokens=10_000):
    found = list(stacks(rows, tokens, CPU))
    assert len(found) == 1
    return found[0]


@pytest.fixture
def rows(make_sample):
    """A row of two sequences (5 + 3 of 12 tokens) with an opd sample, and a shorter one (4 of 12) of plain rl."""
    opd = make_sample(
        3,
        1,
        seed=2,
        advantages=None,
        rl_weights=[0.0] * 3,
        ref_kl_weights=[0.0, 1.0, 1.0],
        ref_logprobs=[0.0, -1.5, -2.5],
    )
    opd.loss = "x"
    long, short = [make_sample(5, 2, seed=1), opd], [make_sample(4, 2, seed=3, loss="math")]
    return long, short, [pack_row(short, 12), pack_row(long, 12)]


def test_rows_of_different_length(rows):
    """Padding, whatever stands in it, reaches none of the flat tensors."""
    long, short, packed = rows
    packed[0] = msgspec.structs.replace(
        packed[0], mask=[True] * 12, logprobs=[*packed[0].logprobs[:4], *[math.nan] * 8]
    )
    packed[0].mask[:4] = short[0].mask
    stack = one_stack([*packed, pack_row([], 12)])
    samples = [*long, *short]
    assert stack.sequence_lengths == [5, 3, 4]  # longest row first
    assert stack.input_ids.shape == stack.position_ids.shape == (3, 8) and stack.forward_tokens == 12
    assert stack.input_ids[0].tolist() == long[0].token_ids + long[1].token_ids
    assert stack.input_ids[1].tolist() == short[0].token_ids + [0] * 4
    assert stack.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert stack.before.tolist() == [-1, 0, 1, 2, 3, -1, 5, 6, -1, 8, 9, 10]
    assert stack.token_ids.tolist() == [t for s in samples for t in s.token_ids]
    assert stack.mask.tolist() == [m for s in samples for m in s.mask]
    assert stack.logprobs.tolist() == pytest.approx([x for s in samples for x in s.logprobs])
    assert stack.losses == ["", "x", "math"] and (stack.temperatures > 0).all()


def test_stream_of_one_row_is_neutral_in_others(rows):
    _, short, packed = rows
    streams = one_stack(packed).streams
    assert streams["rl_weights"].tolist() == [1.0] * 5 + [0.0] * 3 + [1.0] * 4
    assert streams["ref_kl_weights"].tolist() == [0.0] * 5 + [0.0, 1.0, 1.0] + [0.0] * 4
    assert streams["ref_logprobs"].tolist() == [0.0] * 5 + [0.0, -1.5, -2.5] + [0.0] * 4
    assert streams["advantages"][5:8].tolist() == [0.0] * 3
    assert streams["advantages"][8:].tolist() == pytest.approx(short[0].advantages)
    assert set(streams) == set(STREAM_FILL) - {"ce_weights"}  # nobody has those


def test_wanted_is_exactly_the_member_tokens(make_sample):
    plain = make_sample(4, 2, seed=1)
    zero_weight = make_sample(4, 1, seed=2, rl_weights=[1.0, 1.0, 0.0, 1.0])
    sft = make_sample(3, 1, seed=3, advantages=None, rl_weights=[0.0] * 3, ce_weights=[0.0, 1.0, 1.0])
    echo = make_sample(4, 3, seed=4, ce_weights=[0.0, 0.1, 0.0, 0.0])
    stack = one_stack([pack_row([plain, zero_weight, sft, echo], 20)])
    assert stack.wanted.tolist() == [
        *(False, False, True, True),  # the absent rl stream reads 1.0 on the prompt too, which is not wanted for that
        *(False, True, False, True),
        *(False, True, True),
        *(False, True, False, True),
    ]


@pytest.mark.parametrize(
    "budget, shapes", [(1, [(1, 8), (1, 4), (1, 2)]), (8, [(1, 8), (2, 4)]), (16, [(2, 8), (1, 2)])]
)
def test_tokens_per_forward(make_sample, budget, shapes):
    packed = [pack_row([make_sample(n, 1, seed=n)], 8) for n in (2, 8, 4)]
    found = list(stacks(packed, budget, CPU))
    assert [tuple(s.input_ids.shape) for s in found] == shapes
    assert [n for s in found for n in s.sequence_lengths] == [8, 4, 2]
