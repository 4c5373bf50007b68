"""Models that see in this process, and pools that are asked about pictures."""

import asyncio

import pytest
from msgspec.structs import replace
from seeing_engines import Seeing, worst
from seeing_models import WEIGHED, seeing_model, weighed_model

from prl.base.errors import ConfigError, EngineError
from prl.config.hardware import Machine
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.engines.client import InferencePool
from prl.engines.frozen import FrozenPool
from prl.engines.protocol import GENERATE
from prl.engines.transformers import TransformersConfig, TransformersEngine
from prl.engines.vllm.cpu import pictures as on_cpu
from prl.engines.vllm.engine import VLLMConfig, VLLMEngine
from prl.launch.checks import check_loadable
from prl.launch.plan import model_plan
from prl.models import model_path
from prl.rollouts.inputs import ModelInput, Picture
from prl.rollouts.pictures import PictureStore

SAMPLING = {"temperature": 1.0, "seed": 5, "max_tokens": 10}


@pytest.fixture(params=WEIGHED)
def seeing(request, tmp_path):
    return Seeing(weighed_model(request.param, tmp_path / "model"), tmp_path / "pictures")


def spec(path, tmp_path, engine=None, **options):
    model = ModelConfig(path=path, dtype="float32", max_model_len=256)
    return EngineSpec(
        "engine", "policy", model, engine or TransformersConfig(), "cpu", 0, "t", tmp_path / "log", **options
    )


async def in_process(seeing, tmp_path):
    pool = TransformersEngine.policy(spec(seeing.path, tmp_path, pictures=seeing.store), lambda: [])
    await pool.wait_ready(60)
    return pool


async def test_replies_and_scores_in_a_batch_with_text_are_those_of_each_prompt_alone(seeing, tmp_path):
    pool, prompts = await in_process(seeing, tmp_path), seeing.prompts()
    replies = await asyncio.gather(*(pool.generate(prompt, SAMPLING, n=2) for prompt in prompts))
    wholes = []
    for prompt, group in zip(prompts, replies, strict=True):
        for reply in group:
            whole, sampled = seeing.whole(prompt, reply)
            wholes.append(whole)
            assert worst(sampled, seeing.logprobs(whole)[len(prompt) - 1 :]) < 1e-5
    scores = await asyncio.gather(*(pool.top_logprobs(whole, 2) for whole in wholes))
    for whole, score in zip(wholes, scores, strict=True):
        own = seeing.logprobs(whole)
        assert worst(score.own[1:], own) < 1e-5
        assert not whole.pictures or worst(own, seeing.logprobs(whole, blind=True)) > 0.01
    # Three pictures: each was read once, whatever prompts, replies and scores had it. The store is the test's, too.
    assert seeing.store.reads == 3
    await pool.close()


async def test_prompts_that_do_not_fit_their_pictures_are_refused_alone(seeing, tmp_path):
    pool = await in_process(seeing, tmp_path)
    prompt, other = seeing.prompt(["x", 0]), seeing.prompt([1, "y"])
    [shown] = prompt.pictures
    wrong = {
        "place": [replace(shown, start=shown.start + 1)],
        "none": [],
        "too many": [shown, shown],
        "unknown": [replace(shown, digest="0" * 64, features="1" * 64)],
        "other features": [replace(shown, features="1" * 64)],
    }
    asked = [pool.generate(ModelInput(prompt.token_ids, tuple(pictures)), SAMPLING) for pictures in wrong.values()]
    *errors, (reply,) = await asyncio.gather(*asked, pool.generate(other, SAMPLING), return_exceptions=True)
    assert [(type(error), error.status) for error in errors] == [(EngineError, 400)] * len(wrong)
    assert worst(reply.logprobs, seeing.logprobs(other.then(reply.token_ids))[len(other) - 1 :]) < 1e-5
    await pool.close()


async def test_new_weights_of_the_tower_are_seen_with(seeing, tmp_path):
    pool, prompt = await in_process(seeing, tmp_path), seeing.prompt([0, "z"])
    moved = seeing.moved(tmp_path / "moved", "vis")
    moved.model.save_pretrained(tmp_path / "moved")
    await pool.update_weights(1, str(tmp_path / "moved"))
    score = await pool.prompt_logprobs(prompt)
    assert worst(score[1:], moved.logprobs(prompt)) < 1e-5 and worst(score[1:], seeing.logprobs(prompt)) > 0.01
    await pool.close()


SHOWN = ModelInput([1, 2, 2, 3], (Picture(1, 2, "a" * 64, 4, 4, "b" * 64),))


async def answer(request):
    """Prl's route, which says what it was asked."""
    choice = {"index": 0, "token_ids": [7], "logprobs": [-1.0], "finish_reason": "stop"}
    return {"choices": [choice], "prompt_logprobs": [None, -1.0, -1.0, -1.0], "asked": request}


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_server_is_told_of_pictures_and_their_folder(server, frozen, tmp_path, monkeypatch):
    sent, store = [], PictureStore(tmp_path / "the pictures")
    if frozen:
        pool = FrozenPool(FrozenModelConfig("m", f"{server.url}/v1"), "t", store)
        pool._by_prl = asyncio.get_running_loop().create_future()
        pool._by_prl.set_result(True)
    else:
        pool = InferencePool([server.url], "m", "t", pictures=store)

    async def request(method, url, route, body, **options):
        sent.append((route, body))
        return await answer(body)

    monkeypatch.setattr(pool.http, "request", request)
    await pool.generate(SHOWN, {"max_tokens": 1})
    await pool.prompt_logprobs(SHOWN)
    await pool.prompt_logprobs(ModelInput([1, 2, 2, 3]))
    assert [route for route, _ in sent] == [GENERATE] * 3
    for _, body in sent[:2]:
        assert body["pictures"] == SHOWN.pictures and body["picture_folder"] == str(tmp_path / "the pictures")
    assert "pictures" not in sent[2][1] and "picture_folder" not in sent[2][1]
    monkeypatch.setattr(pool, "pictures", None)
    with pytest.raises(EngineError, match="'m' is shown no pictures"):
        await pool.prompt_logprobs(SHOWN)
    await pool.close()


async def test_other_peoples_servers_are_shown_no_pictures(tmp_path):
    pool = FrozenPool(FrozenModelConfig("m", "http://127.0.0.1:9/v1"), "t")
    for asked in (pool.generate(SHOWN, {}), pool.prompt_logprobs(SHOWN)):
        with pytest.raises(EngineError, match=r"'m' at http://127.0.0.1:9 is no server of prl's.*prl\.serve"):
            await asked
    await pool.close()


def test_only_the_server_of_a_model_that_sees_has_torchvision_on_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cpu, "FOLDER", tmp_path / "aside")
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    sees = VLLMEngine.environment(spec(seeing_model("llava", tmp_path / "model"), tmp_path, VLLMConfig()))
    assert sees["PYTHONPATH"] == f"{tmp_path / 'aside'}:/of/the/user" and sees[on_cpu.VARIABLE]
    reads = VLLMEngine.environment(spec(model_path("tiny"), tmp_path, VLLMConfig()))
    assert not {"PYTHONPATH", on_cpu.VARIABLE} & reads.keys()


def test_without_torchvision_such_a_model_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cpu, "FOLDER", tmp_path / "aside")
    model = ModelConfig(path=weighed_model("llava", tmp_path / "model"), max_model_len=256)
    names = {"process": "engine", "served_name": "policy", "token": "t", "log": tmp_path / "log", "sharing": 1}
    vllm = model_plan(VLLMConfig(device="cpu"), model, [()], Machine(), **names)
    with pytest.raises(ConfigError, match=r"sees pictures: no torchvision.*scripts/setup --pictures"):
        check_loadable(model, vllm, "model.", trained=False)
    own = model_plan(TransformersConfig(), model, [], Machine(), **names)
    check_loadable(model, own, "model.", trained=False)
    (tmp_path / "aside" / "torchvision").mkdir(parents=True)
    check_loadable(model, vllm, "model.", trained=False)
