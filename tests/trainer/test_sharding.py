"""Ranks that share parameters against one process with all of them, in float64 and in float32."""

import json
import math

import forking
import pytest
import rounding
import sharded
import torch
from safetensors.torch import load_file

from prl.base.checkpoint_folders import part_path
from prl.rollouts.components import COMPONENTS
from prl.trainer.lora import save_adapters, weights_of
from prl.trainer.sharding import gradient_norm, scale_gradients

pytestmark = pytest.mark.xdist_group("sharding")  # of the same ranks

OF_ALL = ("loss/", "grad_norm", "entropy/", "samples/", "tokens/")
"""Metrics that are sums over all tokens of a step."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Folder, and by number of ranks the lines of each rank."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, ranks_of(folder)


def ranks_of(folder):
    """Run two ranks, then four, which go on from the checkpoint of the two."""
    lines = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for ranks in sharded.RANKS:
            arguments = [(folder, rank, ranks) for rank in range(ranks)]
            assert forking.exit_codes(sharded.main, arguments, 300) == [0] * ranks
            lines[ranks] = [json.loads((folder / f"lines_{ranks}_{rank}.json").read_text()) for rank in range(ranks)]
    return lines


@pytest.fixture(scope="module")
def alone():
    """`alone(name, **changes)`: the trainer of a case, changed, after its steps in one process, and its metrics."""
    torch.set_num_threads(1)

    def run(name, **changes):
        options, most = sharded.options_of(name)
        options |= changes
        for of_ranks in ("shard_size", "cpu_offload"):
            options.pop(of_ranks, None)
        trainer = sharded.make_trainer(**options)
        return trainer, sharded.train(trainer, sharded.STEPS, most=most)

    return run


def assert_same_steps(found, expected, rel=1e-6, of_tokens=True):
    """But for `tokens/forward`: ranks cannot share the tokens of one another's sequences.

    `OF_ALL` has as many digits where it is small. What may come down to single tokens has not: a layer's norm rounds
    them to float32 in any case. With `of_tokens` it is compared too, by the sixth decimal place.
    """
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        rest = {name: value for name, value in theirs.items() if name != "tokens/forward"}
        of_all = {name: value for name, value in rest.items() if name.startswith(OF_ALL)}
        assert {name: mine[name] for name in of_all} == pytest.approx(of_all, rel=rel, abs=0.0)
        assert not of_tokens or {name: mine[name] for name in rest} == pytest.approx(rest, rel=rel, abs=rel)


def bound_of(found, exact):
    """The relative bound of the numbers of steps that ran in float32: they are sums, whose terms may cancel out."""
    pairs = zip(found, exact, strict=True)
    sums = [[{name: line[name] for name in line if name.startswith(OF_ALL)} for line in pair] for pair in pairs]
    bound = max(1e-6, *(rounding.of_numbers(*pair) for pair in sums))
    assert bound < 1e-3, "the case has too few digits"
    return bound


def assert_same_weights(model, folder, rel):
    """The folder has the model's weights, but for a head that is the embedding: by the norm of each tensor."""
    expected, found = dict(weights_of(model)), load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).norm() <= rel * weight.norm(), name
        if weight.dtype == torch.float64 and rel == 1e-6:
            assert (found[name] - weight).abs().max() <= 1e-7 * weight.abs().max(), name  # norms round to float32


@pytest.mark.slow
@pytest.mark.parametrize("name", sharded.CASES)
def test_ranks_train_like_one_process(found, alone, name):
    folder, lines = found
    trainer, expected = alone(name)
    rel = 1e-6 if "float32" not in name else bound_of(expected, alone(name, dtype="float64")[1])
    rel = 2e-3 if name == "Muon" else rel  # it multiplies matrices in bfloat16, each rank its part
    assert all(line["grad_norm"] > 0.4 for line in expected), "more than what it is clipped to"
    one = sharded.held(trainer)
    for ranks, of_ranks in lines.items():
        if name not in of_ranks[0]:
            continue
        assert all(lines_of[name]["metrics"] == of_ranks[0][name]["metrics"] for lines_of in of_ranks)
        assert_same_steps(of_ranks[0][name]["metrics"], expected, rel, of_tokens=rel == 1e-6)
        assert_same_weights(trainer.model, folder / f"{name} {ranks}", rel)
        sharing = sharded.CASES[name].get("shard_size") or ranks
        held = [lines_of[name]["bytes"] for lines_of in of_ranks]
        # The first ranks have a row of each parameter more where the number of rows is no multiple.
        assert one * ranks / sharing <= sum(held) + 1e4 and max(held) < 1.1 * one / sharing


def test_the_cases_are_not_too_easy():
    """Ranks have different numbers of stacks, or none but a dummy; tokens are shared; each component has members."""
    trainer = sharded.make_trainer()

    def stacks(ranks, most=None):
        rows, size = sharded.make_rows(1, most), trainer.config.tokens_per_forward
        return [
            list(trainer.layout(sharded.share_of(rows, rank, ranks), size, trainer.device)) for rank in range(ranks)
        ]

    assert all(len(set(map(len, stacks(ranks)))) > 1 for ranks in (2, 4))
    assert [[len(stack.losses) > 0 for (stack,) in stacks(4, most=2)]] == [[True, True, False, False]]
    assert all(
        own and sum(stack.forward_tokens for stack in own) < 0.9 * sum(sum(stack.sequence_lengths) for stack in own)
        for own in stacks(2)
    )
    (line,) = sharded.train(trainer, (1,))
    assert all(line[f"tokens/{name}"] > 0 for name in COMPONENTS)
    assert any(math.isfinite(value) for name, value in line.items() if name.startswith("ref_kl/"))
    assert line["is_clipped"] != 0.0


def test_the_norm_of_a_large_gradient_is_exact():
    """Of numbers that one sum in float32 would lose, beside small, empty and missing gradients."""
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((1 << 11, 1 << 10), (3,), (), (0, 5), (2,))]
    for parameter in parameters[:4]:
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    parameters[0].grad = parameters[0].grad.t().contiguous().t()
    exact = torch.cat([p.grad.double().flatten() for p in parameters[:4]]).norm().item()
    assert gradient_norm(parameters, None) == pytest.approx(exact, rel=2e-7)
    assert torch.nn.utils.get_total_norm([parameters[0].grad]).item() != pytest.approx(exact, rel=2e-6), "too easy"
    before = parameters[1].grad.clone()
    scale_gradients(parameters, 0.25)
    assert torch.equal(parameters[1].grad, 0.25 * before) and parameters[4].grad is None
    assert gradient_norm(parameters[4:], None) == 0.0


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_number_of_ranks(found, alone):
    """Its file has whole tensors under the same names, whoever wrote it."""
    folder, lines = found
    trainer, _ = alone("untied")
    files = {ranks: part_path(folder / f"checkpoint of {ranks}", sharded.STEPS[-1]) / "state" for ranks in (2, 4)}
    states = [load_file(path / "trainer.safetensors") for path in files.values()]
    of_optimiser = [{name for name in state if name.startswith("optimizer/")} for state in states]
    assert of_optimiser[0] == of_optimiser[1] and len(of_optimiser[0]) == 3 * len(list(trainer.model.parameters()))
    assert (files[2] / "trainer.json").read_text() == (files[4] / "trainer.json").read_text()
    for name, parameter in trainer.model.named_parameters():
        for moment, value in trainer.optimizer.state[parameter].items():
            gap = 1e-6 * value.abs().max().item()
            for state in states:
                saved = state[f"optimizer/{name}/{moment}"]
                torch.testing.assert_close(saved, value.detach(), rtol=0.0, atol=gap)
    expected = sharded.train(trainer, (sharded.NEXT,))
    one = sharded.train(sharded.make_trainer(checkpoint=files[4].parent), (sharded.NEXT,))
    for other in (one, lines[4][0]["gone on"]["metrics"]):  # from weights that were written in float32
        assert_same_steps(other, expected, rel=1e-4)


@pytest.mark.slow
def test_adapters_of_ranks_are_those_of_one_process(found, alone, tmp_path):
    """In the checkpoint's folder for peft, and in the optimiser's state, which has nothing else."""
    folder, _ = found
    trainer, _ = alone("adapters")
    save_adapters(trainer.model, tmp_path)
    expected = load_file(tmp_path / "adapter_model.safetensors")
    assert len(expected) == 2 * 7 * 3
    for ranks in (2, 4):
        part = part_path(folder / f"checkpoint of {ranks} with adapters", sharded.STEPS[-1])
        saved = load_file(part / "adapter" / "adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        for name, matrix in expected.items():
            assert (saved[name] - matrix).abs().max() <= 1e-6 * matrix.abs().max(), name
        config = (tmp_path / "adapter_config.json").read_text()
        assert (part / "adapter" / "adapter_config.json").read_text() == config
        of_optimiser = json.loads((part / "state" / "trainer.json").read_text())["optimizer"]
        assert set(of_optimiser) == {name for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_compiled_layers_train_alike(a_rank, alone):
    _, expected = alone("ranks without a row")
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    trainer = sharded.make_trainer(tied=True, compile=True)
    assert_same_steps(sharded.train(trainer, sharded.STEPS, most=1), expected)
    assert counted["unique_graphs"] > before
