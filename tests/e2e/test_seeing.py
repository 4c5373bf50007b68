"""Models that see on real servers: what they compute is what transformers computes, whatever came before."""

import asyncio

import pytest
from msgspec.structs import replace
from safetensors.torch import save_file
from seeing_engines import Seeing, worst
from seeing_models import WEIGHED, weighed_model

from prl.base.errors import EngineError
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.engines.client import InferencePool
from prl.engines.frozen import FrozenPool
from prl.engines.vllm.engine import VLLMConfig
from prl.launch.local import LocalLauncher
from prl.rollouts.inputs import ModelInput

pytestmark = pytest.mark.engine

SAMPLING = {"temperature": 1.0, "seed": 5, "max_tokens": 10}
KINDS = {"qwen3_vl": VLLMConfig(), "qwen2_5_vl": VLLMConfig(cpu_patches=False), "llava": VLLMConfig()}


@pytest.fixture(scope="module", params=WEIGHED)
def served(request, tmp_path_factory):
    """A model and the address of its server. One server has none of prl's patches that make it faster."""
    folder = tmp_path_factory.mktemp(request.param)
    seeing = Seeing(weighed_model(request.param, folder / "model"), folder / "of the run" / "pictures")
    model = ModelConfig(path=seeing.path, dtype="float32", max_model_len=512)
    config, log = KINDS[request.param], folder / "log"
    with LocalLauncher() as launcher:
        yield seeing, launcher.start_engine(EngineSpec("engine", "policy", model, config, "cpu", 0, "token", log))


@pytest.fixture
async def asked(served):
    """The model, and a client of its server with the first weights."""
    seeing, url = served
    pool = InferencePool([url], "policy", "token", pictures=seeing.store)
    await pool.wait_ready(240)
    await pool.update_weights(0, seeing.path)
    yield seeing, pool
    await pool.close()


async def test_replies_and_scores_are_those_of_the_model(asked):
    seeing, pool = asked
    prompts = seeing.prompts()
    replies = await asyncio.gather(*(pool.generate(prompt, SAMPLING, n=3) for prompt in prompts))
    for prompt, group in zip(prompts, replies, strict=True):
        for reply in group:
            whole, sampled = seeing.whole(prompt, reply)
            own = seeing.logprobs(whole)
            assert worst(sampled, own[len(prompt) - 1 :]) < 1e-5
        assert worst((await pool.top_logprobs(whole, 2)).own[1:], own) < 1e-5
        assert not whole.pictures or worst(own, seeing.logprobs(whole, blind=True)) > 0.01


async def test_equal_ids_with_other_pictures_are_other_prompts(asked):
    seeing, pool = asked
    one, two = seeing.prompt([3, "Which?"]), seeing.prompt([6, "Which?"])
    assert one.token_ids == two.token_ids and one.keys != two.keys
    for _ in range(2):  # together, and with the prefixes of both in the cache
        scores = await asyncio.gather(*(pool.prompt_logprobs(prompt) for prompt in (one, two, one)))
        for prompt, score in zip((one, two, one), scores, strict=True):
            assert worst(score[1:], seeing.logprobs(prompt)) < 1e-5
        groups = await asyncio.gather(*(pool.generate(prompt, SAMPLING, n=4) for prompt in (one, two)))
        for prompt, group in zip((one, two), groups, strict=True):
            for reply in group:
                whole, sampled = seeing.whole(prompt, reply)
                assert worst(sampled, seeing.logprobs(whole)[len(prompt) - 1 :]) < 1e-5
    assert worst(seeing.logprobs(one), seeing.logprobs(two)) > 0.01


async def test_after_an_update_of_the_tower_pictures_are_seen_anew(asked, tmp_path):
    seeing, pool = asked
    prompt = seeing.prompt([0, "z"])
    moved = seeing.moved(tmp_path / "moved", "vis")
    save_file(moved.model.state_dict(), tmp_path / "moved" / "model.safetensors", metadata={"format": "pt"})
    before = await pool.prompt_logprobs(prompt)
    running = asyncio.create_task(pool.generate(prompt, SAMPLING | {"max_tokens": 400}, n=16))
    await asyncio.sleep(0.3)
    await pool.update_weights(1, moved.path)
    after = await pool.prompt_logprobs(prompt)
    assert worst(before[1:], seeing.logprobs(prompt)) < 1e-5 and worst(before, after) > 0.01
    assert worst(after[1:], moved.logprobs(prompt)) < 1e-5
    # What ran through the update went on with the new weights, its prompt computed anew.
    whole, sampled = seeing.whole(prompt, max(await running, key=lambda reply: len(seeing.whole(prompt, reply)[1])))
    old, new = (model.logprobs(whole)[len(prompt) - 1 :] for model in (seeing, moved))
    assert ((sampled - old).abs().minimum((sampled - new).abs()) < 1e-5).all()


async def test_prompts_that_do_not_fit_their_pictures_are_refused_and_the_engine_goes_on(asked):
    seeing, pool = asked
    prompt = seeing.prompt(["x", 0])
    [shown] = prompt.pictures
    wrong = {
        "place": [replace(shown, start=shown.start + 1)],
        "outside": [replace(shown, start=10_000)],
        "overlap": [shown, replace(shown, start=shown.start + 1)],
        "none": [],
        "unknown": [replace(shown, digest="0" * 64, features="1" * 64)],
        "no digest": [replace(shown, digest="../../secret")],
        "other features": [replace(shown, features="1" * 64)],
        "no size": [replace(shown, width=-1)],
    }
    for name, pictures in wrong.items():
        with pytest.raises(EngineError) as refused:
            await pool.prompt_logprobs(ModelInput(prompt.token_ids, tuple(pictures)))
        assert refused.value.status == 400, name
    longer = ModelInput([*prompt.token_ids, *prompt.token_ids[shown.start : shown.stop]], prompt.pictures)
    with pytest.raises(EngineError, match="placeholders"):
        await pool.generate(longer, SAMPLING)
    assert worst((await pool.prompt_logprobs(prompt))[1:], seeing.logprobs(prompt)) < 1e-5


async def test_a_picture_is_read_once_and_a_frozen_model_sees_it_too(asked):
    seeing, pool = asked
    prompt = seeing.prompt([2, "once"])
    await pool.generate(prompt, SAMPLING)
    [file] = [seeing.store.features_file(picture.digest, picture.features) for picture in prompt.pictures]
    kept = seeing.store.features(prompt.pictures[0])
    file.unlink()  # server and engine core have read it
    frozen = FrozenPool(FrozenModelConfig("policy", f"{pool.urls[0]}/v1"), "token", seeing.store)
    assert worst((await frozen.top_logprobs(prompt, 3)).own[1:], seeing.logprobs(prompt)) < 1e-5
    (reply,) = await frozen.generate(prompt, SAMPLING)
    (same,) = await pool.generate(prompt, SAMPLING)
    assert reply.token_ids == same.token_ids
    await frozen.close()
    seeing.store.keep_features(prompt.pictures[0].digest, kept)
