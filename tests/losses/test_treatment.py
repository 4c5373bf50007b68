"""What the loss says that it did with each token."""

import functools
import math

import pytest
import torch

from prl.losses import LossCounts, LossOutputs, TokenTreatment, aipo_loss, compute_loss, default_loss

NAN = math.nan
UP, DOWN = math.log(0.9), math.log(0.3)
FAR, NEAR, SURE = UP - 3.0, UP - 0.05, math.log(0.9)  # the sampler: much less sure than UP, as sure, surer than DOWN
TOKENS = [
    # the policy's logprob, the sampler's, A, mask, the weights of rl, ce and ref_kl, labels
    (UP, NEAR, 1.0, 1, 1, 0, 0, ["rl kept"]),
    (UP, FAR, 1.0, 1, 1, 0, 0, ["rl dropped"]),
    (UP, FAR, -1.0, 1, 1, 0, 0, ["rl clipped"]),
    (DOWN, SURE, -1.0, 1, 1, 0, 0, ["rl dropped"]),
    (DOWN, SURE, 1.0, 1, 1, 0, 0, ["rl kept"]),
    (UP, NAN, 1.0, 1, 1, 0, 0, ["invalid logprob"]),
    (UP, -9999.0, 1.0, 1, 1, 0, 0, ["invalid logprob"]),
    (UP, 0.0, 0.0, 0, 1, 0, 0, []),
    (UP, NAN, NAN, 0, 1, 0, 0, []),
    (UP, NAN, 1.0, 1, 0, 0, 0, []),
    (UP, NEAR, 1.0, 1, 0.5, 0, 0, ["rl kept"]),
    (UP, NAN, 0.0, 0, 1, 0.1, 0, ["ce"]),
    (UP, 0.0, 0.0, 1, 0, 1, 0, ["ce"]),
    (UP, FAR, 0.0, 1, 0, 0, 1, ["ref_kl kept"]),
    (DOWN, SURE, 0.0, 0, 0, 0, 1, ["ref_kl dropped"]),
    (UP, NAN, 0.0, 1, 0, 0, 1, ["invalid logprob"]),
    (UP, FAR, 1.0, 1, 1, 0.3, 0, ["rl dropped", "ce"]),
    (UP, NAN, 1.0, 1, 1, 0.3, 0, ["ce", "invalid logprob"]),
    (DOWN, SURE, 1.0, 1, 1, 0, 0.7, ["rl kept", "ref_kl dropped"]),
    (UP, NAN, 1.0, 1, 1, 0, 0.7, ["invalid logprob"]),
    (UP, NEAR, 1.0, 1, 1, 1, 1, ["rl kept", "ce", "ref_kl kept"]),
]


def labels_of(tokens, rl_loss):
    """The labels of each token of a row, and which tokens read the sampler."""
    t, i, advantages, mask, rl, ce, ref_kl = torch.tensor([token[:7] for token in tokens], dtype=torch.float64).T
    treatment = TokenTreatment()
    compute_loss(
        trainer_logprobs=t.clone().requires_grad_(),
        inference_logprobs=i,
        loss_mask=mask.bool(),
        advantages=advantages,
        ref_logprobs=t - 0.2,
        rl_weights=rl,
        ce_weights=ce,
        ref_kl_weights=ref_kl,
        sequence_lengths=[len(tokens)],
        counts=LossCounts(),
        rl_loss=rl_loss,
        treatment=treatment,
    )
    labels = [[label for label, on in treatment.labels.items() if on[place]] for place in range(len(tokens))]
    return labels, treatment.sampled.tolist()


def test_every_token_has_the_labels_of_its_components():
    labels, sampled = labels_of(TOKENS, default_loss)
    assert labels == [token[-1] for token in TOKENS]
    assert sampled == [any(label.startswith(("rl", "ref_kl")) for label in token[-1]) for token in TOKENS]


def squared(inputs):
    """A custom loss: one sequence at a time, no token terms."""
    return LossOutputs((inputs.trainer_logprobs[inputs.loss_mask] ** 2).sum(), {})


@pytest.mark.parametrize(
    ("rl_loss", "expected"),
    [
        (functools.partial(aipo_loss, delta=8.0), ["rl kept", "rl clipped", "rl clipped"]),
        (functools.partial(default_loss, dppo_mask_high=1.0, delta=None), ["rl kept"] * 3),
        (squared, ["rl"] * 3),
    ],
)
def test_labels_of_other_losses(rl_loss, expected):
    assert labels_of(TOKENS[:3], rl_loss)[0] == [[label] for label in expected]
