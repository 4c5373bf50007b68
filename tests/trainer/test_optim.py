"""The optimisers, made of their config node: torch's, or a user's own, each for its part of the parameters."""

import copy
from dataclasses import asdict

import pytest
import torch

from prl.base.errors import ConfigError
from prl.config.build import plain
from prl.config.compose import compose
from prl.config.trainer import AdamWConfig
from prl.trainer.optim import make_optimizers


class Halver(torch.optim.Optimizer):
    """A user's own."""

    def __init__(self, params, lr, share=0.5):
        super().__init__(params, {"lr": lr, "share": share})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(group["share"])


class TwoLayers(torch.nn.Module):
    """A model with all that a filter has to tell apart: an embedding, matrices, a norm, a bias, and a head."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(7, 4)
        self.first = torch.nn.Linear(4, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.second = torch.nn.Linear(6, 4, bias=False)
        self.lm_head = torch.nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        return self.lm_head(self.second(self.norm(self.first(self.embed_tokens(ids)))))


MATRICES = {"first.weight", "second.weight"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TwoLayers()


def node_of(*overrides):
    """`trainer.optim` as the trainer process gets it."""
    return plain(compose(["run.name=x", *overrides]).trainer.optim)


def adamw(**settings):
    return asdict(AdamWConfig()) | settings


def train(model, optimizer, steps=3):
    """A few steps on one batch; the parameters by name."""
    ids = torch.arange(7)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids), ids.flip(0)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain_torch(model, option):
    """The optimisers of `conf/optim/<option>.yaml`, by torch alone."""
    named = dict(model.named_parameters())
    decayed = [parameter for parameter in named.values() if parameter.dim() == 2]
    others = [parameter for parameter in named.values() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if option == "adamw":
        return [torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))]
    if option == "sgd":
        return [torch.optim.SGD(groups, lr=0.01, momentum=0.9)]
    rest = [parameter for name, parameter in named.items() if name not in MATRICES]
    muon = torch.optim.Muon(
        [named[name] for name in sorted(MATRICES)], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    return [torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0), muon]


@pytest.mark.parametrize(
    ("option", "overrides"),
    [
        ("adamw", ["trainer.optim.weight_decay=0.1"]),
        ("sgd", ["trainer.optim.weight_decay=0.1", "trainer.optim.momentum=0.9"]),
        ("muon", []),
    ],
)
def test_each_option_steps_as_plain_torch_does(model, option, overrides):
    other = copy.deepcopy(model)
    found = train(model, make_optimizers(model, node_of(f"optim={option}", "trainer.optim.lr=0.01", *overrides)))

    class Each:
        optimizers = plain_torch(other, option)

        def zero_grad(self):
            other.zero_grad()

        def step(self):
            for optimizer in self.optimizers:
                optimizer.step()

    expected = train(other, Each())
    for name, value in expected.items():
        assert not torch.equal(value, torch.zeros_like(value))
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_muon_trains_layer_matrices_and_adamw_the_rest(tiny):
    """Of a real model too; a tied head is the embedding."""
    optimizers = make_optimizers(tiny, node_of("optim=muon")).optimizers
    names = {parameter: name for name, parameter in tiny.named_parameters()}
    rest, muon = [{names[p] for group in each.param_groups for p in group["params"]} for each in optimizers]
    assert [type(each) for each in optimizers] == [torch.optim.AdamW, torch.optim.Muon]
    assert muon == {name for name in names.values() if name.endswith("_proj.weight")}
    assert rest | muon == set(names.values()) and not rest & muon


def test_the_first_part_that_matches_takes_a_parameter(model):
    parts = {
        "heads": {"match": "head", "_target_": "torch.optim.SGD", "lr": 1.0},
        "matrices": {"dims": 2, "_target_": "torch.optim.SGD", "lr": 2.0},
    }
    groups = make_optimizers(model, adamw(parts=parts)).param_groups
    rates = {name: g["lr"] for name, p in model.named_parameters() for g in groups if any(p is q for q in g["params"])}
    assert rates["lm_head.weight"] == 1.0 and rates["first.weight"] == rates["embed_tokens.weight"] == 2.0
    assert rates["norm.weight"] == rates["first.bias"] == 5e-4


def test_a_class_of_the_users_own(tiny):
    groups = make_optimizers(tiny, {"_target_": f"{__name__}.Halver", "lr": 0.1, "share": 0.25}).param_groups
    assert [(group["lr"], group["share"]) for group in groups] == [(0.1, 0.25)] * 2
    assert all("weight_decay" not in group for group in groups)


SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


@pytest.mark.parametrize(
    ("node", "key"),
    [
        (adamw(_target_="torch.nn.Linear"), "trainer.optim._target_"),
        (adamw(_target_="torch.optim.SGB"), "trainer.optim._target_"),
        (SGD | {"betas": [0.8, 0.9]}, "trainer.optim.betas"),
        (adamw(momentum=0.9), "trainer.optim.momentum"),
        ({"_target_": "torch.optim.LBFGS", "lr": 0.1}, "trainer.optim._target_"),
        ({"_target_": "torch.optim.Muon", "lr": 0.1}, "trainer.optim._target_"),
        (adamw(parts={"none": SGD | {"match": "no_such_layer"}}), "trainer.optim.parts.none"),
        (adamw(parts={"own": SGD | {"momentun": 0.9}}), "trainer.optim.parts.own.momentun"),
        (adamw(parts={"own": {"_target_": "torch.optim.Muon"}}), "trainer.optim.parts.own._target_"),
    ],
)
def test_what_cannot_be_is_refused(tiny, node, key):
    with pytest.raises(ConfigError, match=f"^{key}\\b"):
        make_optimizers(tiny, node)
