"""The optimiser, made of its config node: any of torch's, or a user's own."""

import copy
import json
from dataclasses import asdict

import pytest
import torch

from prl.config.signature import check_value
from prl.errors import ConfigError
from prl.trainer.config import OptimConfig, TrainerConfig
from prl.trainer.trainer import make_optimizer


class Halver(torch.optim.Optimizer):
    """A user's own."""

    def __init__(self, params, lr, share=0.5):
        super().__init__(params, {"lr": lr, "share": share})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(group["share"])


def as_json(**settings):
    """The node as the trainer process gets it."""
    return json.loads(json.dumps(asdict(OptimConfig()))) | settings


def test_the_default_is_adamw_with_its_settings(tiny):
    optimizer = make_optimizer(tiny, as_json(weight_decay=0.2))
    assert type(optimizer) is torch.optim.AdamW
    for group, decay in zip(optimizer.param_groups, (0.2, 0.0), strict=True):
        assert (group["lr"], list(group["betas"]), group["eps"], group["fused"]) == (5e-4, [0.9, 0.95], 1e-8, True)
        assert group["weight_decay"] == decay


@pytest.mark.parametrize("node", [OptimConfig(_target_="torch.optim.SGD"), as_json(_target_="torch.optim.SGD")])
def test_another_class_needs_nothing_but_its_name(tiny, node):
    """Settings of AdamW at their defaults, which SGD does not take, are left out."""
    optimizer = make_optimizer(tiny, node)
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["lr"] == 5e-4
    before = copy.deepcopy(tiny.state_dict())
    for parameter in tiny.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, value in tiny.state_dict().items():
        torch.testing.assert_close(value, before[name] - 5e-4)


def test_settings_of_another_class(tiny):
    node = as_json(_target_="torch.optim.SGD", momentum=0.9, weight_decay=0.1)
    groups = make_optimizer(tiny, node).param_groups
    assert [group["momentum"] for group in groups] == [0.9, 0.9]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.dim() < 2 for p in groups[1]["params"])


def test_a_class_of_the_users_own(tiny):
    node = as_json(_target_=f"{__name__}.Halver", share=0.25)
    groups = make_optimizer(tiny, node).param_groups
    assert [(group["lr"], group["share"]) for group in groups] == [(5e-4, 0.25)] * 2
    assert all("weight_decay" not in group for group in groups)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"_target_": "torch.nn.Linear"},
            "trainer.optim._target_='torch.nn.Linear' is not a subclass of torch.optim.optimizer.Optimizer",
        ),
        ({"_target_": "torch.optim.SGB"}, "module torch.optim has no 'SGB'"),
        ({"_target_": "torch.optim.SGD", "betas": [0.8, 0.9]}, "trainer.optim.betas: SGD has no such knob"),
        ({"momentun": 0.9, "_target_": "torch.optim.SGD"}, "did you mean trainer.optim.momentum"),
        ({"momentum": 0.9}, "trainer.optim.momentum: AdamW has no such knob"),
        (
            {"_target_": "torch.optim.LBFGS"},
            "trainer.optim._target_=torch.optim.LBFGS: LBFGS doesn't support per",
        ),
    ],
)
def test_what_cannot_be_is_refused(tiny, settings, message):
    with pytest.raises(ConfigError) as caught:
        make_optimizer(tiny, as_json(**settings))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", 0.0, "must be above 0 and at most 1000000.0, got 0.0"),
        ("eps", -1.0, "must be above 0"),
        ("weight_decay", -0.1, "must be from 0 to 1000000.0"),
        ("betas", [0.9, 1.0], "must be from 0 to below 1"),
        ("betas", [-0.1, 0.9], "must be from 0 to below 1"),
        ("lr", float("nan"), "must be above 0 and at most 1000000.0, got nan"),
    ],
)
def test_bounds_stand_beside_the_settings(key, value, message):
    config = TrainerConfig(optim=OptimConfig(**{key: value}))
    with pytest.raises(ConfigError, match=f"trainer.optim.{key} {message}"):
        check_value(TrainerConfig, config, "trainer")
