"""The model in bfloat16 on a CPU, in one process: what is rounded and what is not."""

import pytest
import torch
import torch.distributed as dist

from prl.config.trainer import BFLOAT16, FLOAT32, precision_of
from prl.rollouts.messages import StepBatch
from prl.rollouts.packing import pack
from prl.trainer.logprobs import chunked_logprobs
from prl.trainer.sharding import whole
from prl.trainer.worker import make_trainer


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [
        ("auto", "cpu", FLOAT32),
        ("auto", "cuda", BFLOAT16),
        ("float32", "cuda", FLOAT32),
        ("bfloat16", "cpu", BFLOAT16),
        ("float32", "cpu", FLOAT32),
    ],
)
def test_which_format_a_device_has(dtype, device, precision):
    assert precision_of(dtype, device) is precision


@pytest.fixture
def alone():
    """Where a process has met itself, that ends with the test."""
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0, "target_modules": None}], ids=["weights", "adapters"])
def test_bfloat16_rounds_the_model_not_weights_or_gradients(alone, tiny_path, make_sample, monkeypatch, lora):
    seen = []

    def spy(hidden, weight, targets, temperatures, **options):
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperatures, **options)
        seen.append((weight.dtype, logprobs.dtype, set(temperatures.tolist())))
        return logprobs, entropy

    monkeypatch.setattr("prl.trainer.model.chunked_logprobs", spy)
    rows, _ = pack([make_sample(20, 4, seed=seed, temperatures=[1.1] * 20) for seed in range(4)], 64, 1)
    gradients = []
    for dtype in ("float32", "bfloat16"):
        config = {
            "model": {"path": tiny_path, "dtype": "float32", "trust_remote_code": False, "lora": lora},
            "losses": {"": {"_target_": "prl.losses.default_loss", "_partial_": True}},
            "trainer": {"_target_": "prl.trainer.trainer.Trainer", "device": "cpu", "dtype": dtype},
            "seed": 0,
            "max_steps": 1,
            "references": [],
        }
        trainer = make_trainer(config, torch.device("cpu"))
        attended, products = set(), set()
        layer = trainer.model.base_model.layers[1]
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, seen=attended: seen.add(args[0].dtype))
        layer.mlp.down_proj.register_forward_hook(lambda _, args, out, seen=products: seen.add(out.dtype))
        trainer.train_step(StepBatch(1, rows[0], 0))
        assert attended == products == {getattr(torch, dtype)}
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        state = [value for of_one in trainer.optimizer.state.values() for value in of_one.values()]
        of_all = [*trainer.model.parameters(), *(parameter.grad for parameter in trained), *state]
        assert {each.dtype for each in of_all} == {torch.float32}
        gradients.append(torch.cat([whole(parameter.grad).flatten() for parameter in trained]))
    assert seen[0][:2] == (torch.float32, torch.float32) and seen[-1][:2] == (torch.bfloat16, torch.float32)
    assert seen[-1][2] == {torch.tensor(1.1).item()}, "bfloat16 would have made it 1.1016"
    exact, rounded = gradients
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.1
