"""What a dry run plays: each algorithm and loss of the tree passes, and what would end a first step is refused."""

import math

import pytest

from prl.algorithms.base import Algorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.losses.interface import LossOutputs
from prl.train import main as dry_run

HERE = __name__


class Raises(GRPOAlgorithm):
    def score_group(self, group):
        raise KeyError("no such field")


class TooShort(Algorithm):
    def score_group(self, group):
        group[0].assign_advantages([1.0])


class NoReference(GRPOAlgorithm):
    async def score_rollout(self, rollout):
        for sample in rollout.samples:
            sample.ref_kl_weights = [1.0] * len(sample.token_ids)


def not_finite(inputs):
    return LossOutputs(loss=(inputs.trainer_logprobs * math.nan).sum(), metrics={})


def of_another_shape(inputs):
    return LossOutputs(loss=inputs.trainer_logprobs, metrics={})


def dry(tmp_path, *overrides):
    dry_run(compose(["run.name=x", f"run.dir={tmp_path / 'run'}", "dry_run=true", "machine.ram_gb=64", *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "algo=opd env=reverse_text",
        "algo=opd algo.divergence=jsd algo.top_k=4",
        "algo=opd algo.align=text env=calculator",
        "algo=opd algo.teacher={name:big,base_url:http://127.0.0.1:9/v1}",  # nobody is asked
        "algo=opd algo.teacher=ema algo.divergence=reverse_kl",
        "algo=sft",
        "algo=sft env=math_retry",
        "algo=echo env=calculator",
        "algo.kl.coef=0.1 env=[math,kuhn_poker]",
        "loss=ppo loss.proximal=true trainer.updates_per_batch=2",
        "model.lora.rank=4 trainer.num_processes=2 machine.cores=4",
    ],
)
def test_what_a_run_can_do_passes(tmp_path, capsys, overrides):
    dry(tmp_path, *overrides.split())
    assert capsys.readouterr().out.endswith("fits\n") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        ("algo=custom_class algo._target_={}.Raises", r"^algo: .*Raises.*no such field"),
        ("algo=custom_class algo._target_={}.TooShort", r"^algo: .*TooShort.*advantages must align"),
        ("algo=custom_class algo._target_={}.NoReference", r"^trainer: .*ref_logprobs"),
        ("loss=custom loss._target_={}.not_finite", r"^trainer: an invented batch failed: .*norm is nan"),
        ("loss=custom loss._target_={}.of_another_shape", r"^trainer: an invented batch failed: .*scalar"),
    ],
)
def test_what_would_end_the_first_step_is_refused(tmp_path, overrides, refusal):
    with pytest.raises(ConfigError, match=refusal):
        dry(tmp_path, *overrides.format(HERE).split())
    assert not (tmp_path / "run").exists()
