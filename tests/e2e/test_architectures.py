"""Engines of small random models: what they sample is what the trainer computes, before and after an update."""

import contextlib
import copy
import secrets
import shutil

import pytest
import torch
from architectures import MIXTURES, SERVED, give_adapters, write_model
from safetensors.torch import load_file, save_file

from prl.config.schema import ModelConfig, VLLMConfig
from prl.engines.client import InferencePool
from prl.launch.launcher import EngineSpec
from prl.launch.local import LocalLauncher
from prl.losses import default_loss
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.trainer.config import AdamWConfig
from prl.trainer.model import load_model, save_weights
from prl.trainer.trainer import Trainer

pytestmark = pytest.mark.engine

SAMPLING = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
PROMPTS = [list(range(10, 40)), list(range(60, 75))]


async def sampled(pool, seed):
    """Samples of the prompts, four of each, with the engine's logprobs."""
    found = []
    for prompt in PROMPTS:
        for completion in await pool.generate(prompt, SAMPLING | {"seed": seed}, n=4):
            on = [0.0] * len(prompt) + [1.0] * len(completion.token_ids)
            found.append(
                TrainingSample(
                    token_ids=prompt + completion.token_ids,
                    mask=[bool(each) for each in on],
                    logprobs=[0.0] * len(prompt) + completion.logprobs,
                    temperatures=[1.0] * len(on),
                    env_name="x",
                    reward=0.0,
                    advantages=[(-1.0) ** len(found) * each for each in on],
                )
            )
    return found


@pytest.fixture(params=SERVED)
async def served(request, tmp_path):
    """A name, a model folder, and a client of an engine that serves it."""
    folder = write_model(tmp_path / "model", request.param, tied=SERVED[request.param] == "tied")
    async with serving(folder, tmp_path) as pool:
        yield request.param, folder, pool


@contextlib.asynccontextmanager
async def serving(folder, tmp_path, dtype="float32"):
    """A client of an engine that serves the model in a folder."""
    spec = EngineSpec(
        process="engine",
        served_name="policy",
        model=ModelConfig(path=str(folder), dtype=dtype, max_model_len=256),
        config=VLLMConfig(max_num_seqs=16),
        device="cpu",
        seed=0,
        token=secrets.token_hex(16),
        log=tmp_path / "engine.log",
    )
    with LocalLauncher() as launcher:
        pool = InferencePool([launcher.start_engine(spec)], "policy", spec.token)
        await pool.wait_ready(240, launcher.ensure_alive)
        yield pool
        await pool.close()


def trainer_of(model):
    options = {"device": "cpu", "optim": AdamWConfig(lr=1e-2)}
    return Trainer(model=model, rl_losses={"": default_loss}, max_steps=2, **options)


async def test_engine_and_trainer_agree_after_every_update(served, tmp_path):
    """Of a mixture of experts all weights are trained; elsewhere adapters, which are merged into what is published."""
    name, folder, pool = served
    base = load_model(str(folder), device=torch.device("cpu"))
    policy = copy.deepcopy(base)
    trainer = trainer_of(policy if name in MIXTURES else give_adapters(policy))
    batches = []
    for version in (0, 1, 2):
        if version:
            save_weights(trainer.model, tmp_path / "published", torch.float32)
            await pool.update_weights(version, str(tmp_path / "published"))
            published = load_model(str(tmp_path / "published"), device=torch.device("cpu"))
        batches.append(StepBatch(version + 1, pack(await sampled(pool, version), 256, 1)[0][0], 0))
        metrics = (trainer if version else trainer_of(copy.deepcopy(base))).train_step(batches[version])
        assert metrics["tokens/rl"] == 8 * 20 and metrics["logprob_gap/mean"] < 1e-5, version
    assert gap_of(copy.deepcopy(base), batches[2]) > 1e-2, "with the weights of before"
    for part, least in {".experts.": 1e-2 * (name in MIXTURES), ".sinks": 1e-4 * (name == "gpt-oss")}.items():
        mixed = copy.deepcopy(published)
        with torch.no_grad():
            for key, parameter in mixed.named_parameters():
                if part in key:
                    parameter.copy_(base.get_parameter(key))
        assert not least or gap_of(mixed, batches[2]) > least, f"with the {part} of before"


async def test_sinks_in_half_precision_are_those_of_the_update(tmp_path):
    """The engine's attention has a copy of them then. Nothing else is changed here."""
    tensors = load_file(write_model(tmp_path / "old", "gpt-oss", tied=False) / "model.safetensors")
    sinks = {name: tensor - 2 for name, tensor in tensors.items() if name.endswith(".sinks")}
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    save_file(tensors | sinks, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    async with serving(tmp_path / "old", tmp_path, "float16") as pool:
        before = StepBatch(1, pack(await sampled(pool, 0), 256, 1)[0][0], 0)
        await pool.update_weights(1, str(tmp_path / "new"))
        after = StepBatch(1, pack(await sampled(pool, 1), 256, 1)[0][0], 0)
    old, new = (str(tmp_path / name) for name in ("old", "new"))
    for path, batch, near in ((old, before, True), (new, after, True), (old, after, False)):
        gap = gap_of(load_model(path, device=torch.device("cpu")), batch)
        assert gap < 0.02 if near else gap > 0.2, (path, gap)


def gap_of(model, batch):
    """The mean difference of the sampler's logprobs from the model's."""
    return trainer_of(model).train_step(batch)["logprob_gap/mean"]
