"""The client of a model in this process: what it answers, when it loads weights, and what it refuses."""

import asyncio
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from prl.base.errors import ConfigError, EngineError
from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.engines.tokenizers import TokenizerProbe
from prl.engines.transformers import TransformersConfig, TransformersEngine
from prl.models import model_path
from prl.rollouts.inputs import ModelInput

PROMPT = list(range(30, 50))
SAMPLING = {"temperature": 1.0, "seed": 5, "max_tokens": 8}


def spec(tmp_path, name="tiny", **options):
    model = ModelConfig(path=model_path(name), dtype="float32", max_model_len=64)
    config = TransformersConfig(max_num_seqs=8)
    return EngineSpec("engine", "policy", model, config, "cpu", 0, "token", tmp_path / "log", **options)


@pytest.fixture
async def pool(tmp_path):
    pool = TransformersEngine.policy(spec(tmp_path), lambda spec: [])
    await pool.wait_ready(60)
    yield pool
    await pool.close()


def nothing_served(spec):
    raise AssertionError("a model in this process has no server")


async def test_it_answers_as_a_server_does(pool):
    asked = [pool.generate(ModelInput([*PROMPT, number]), SAMPLING, n=3) for number in range(7)]  # more than one batch
    groups = await asyncio.gather(*asked)
    assert [len(group) for group in groups] == [3] * 7
    for completion in itertools.chain(*groups):
        assert len(completion.token_ids) == len(completion.logprobs) <= 8
        assert (completion.start_version, completion.end_version) == (0, 0)
        assert completion.finish_reason in ("stop", "length")
    (again,) = await asyncio.gather(pool.generate(ModelInput([*PROMPT, 4]), SAMPLING, n=3))
    assert [each.token_ids for each in again] == [each.token_ids for each in groups[4]]
    scores = await pool.prompt_logprobs(ModelInput([*PROMPT, 4, *again[0].token_ids]))
    assert scores[0] == 0.0 and scores[-len(again[0].token_ids) :] == pytest.approx(again[0].logprobs, abs=1e-4)
    assert pool.answered == 9 and pool.requests_in_flight == 0 and pool.traffic.busy_s > 0


async def test_what_leaves_tokens_out_is_refused_by_name(pool):
    with pytest.raises(EngineError, match="engine=transformers has no logit_bias, min_p: engine=default"):
        await pool.generate(ModelInput(PROMPT), SAMPLING | {"logit_bias": {}, "min_p": 0.1})


async def test_the_models_own_end_tokens_end_a_reply(pool, tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = tokenizer.encode("<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n")
    replies = await pool.generate(ModelInput(prompt), {"seed": 0, "max_tokens": 30}, n=8)
    assert {reply.finish_reason for reply in replies} == {"stop"}
    assert all(reply.token_ids.index(end) == len(reply.token_ids) - 1 for reply in replies)


async def test_no_reply_is_of_two_versions(pool, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
    before = await pool.prompt_logprobs(ModelInput(PROMPT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    model.save_pretrained(tmp_path / "weights")
    asked = [asyncio.create_task(pool.generate(ModelInput([*PROMPT, number]), SAMPLING, n=8)) for number in range(4)]
    await asyncio.sleep(0)
    update = asyncio.create_task(pool.update_weights(3, str(tmp_path / "weights")))
    await asyncio.sleep(0)
    assert (pool.loading, pool.version) == (3, 0)
    replies = list(itertools.chain(*await asyncio.gather(*asked)))
    await update
    assert all(reply.start_version == reply.end_version for reply in replies)
    assert (pool.version, pool.loading, pool.cache_salt) == (3, None, "v3")
    assert (await pool.generate(ModelInput(PROMPT), SAMPLING))[0].start_version == 3
    after = await pool.prompt_logprobs(ModelInput(PROMPT))
    assert after != pytest.approx(before, abs=1e-2)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    assert after[1:] == pytest.approx(
        [float(row[token]) for row, token in zip(logprobs, PROMPT[1:], strict=True)], abs=1e-4
    )


@pytest.mark.parametrize("length", [0, 64, 100])
async def test_a_prompt_without_room_for_a_token_is_refused(pool, length):
    with pytest.raises(EngineError) as refused:
        await pool.generate(ModelInput([3] * length), SAMPLING)
    assert refused.value.status == 400 and not refused.value.of_server
    with pytest.raises(EngineError):
        await pool.prompt_logprobs(ModelInput([3] * (length + (length == 64))))


async def test_weights_that_cannot_be_loaded_leave_the_old_ones(pool, tmp_path):
    with pytest.raises(EngineError, match=str(tmp_path)):
        await pool.update_weights(1, str(tmp_path))
    assert pool.version == 0 and (await pool.generate(ModelInput(PROMPT), SAMPLING))[0].start_version == 0


async def test_closing_ends_what_is_sampled(pool):
    asked = asyncio.create_task(pool.generate(ModelInput([3]), {"max_tokens": 60, "seed": 0, "temperature": 2.0}, n=8))
    await asyncio.sleep(0.02)
    await pool.close()
    with pytest.raises((EngineError, asyncio.CancelledError)):
        await asked


async def test_a_frozen_model_has_no_versions_and_no_logprobs(tmp_path, tokenizer):
    connect = TransformersEngine.frozen(spec(tmp_path, "tiny-teacher", frozen=True), nothing_served)
    pool = connect(FrozenModelConfig(name="teacher"))
    await pool.wait_ready(60)
    assert pool.up and pool.version is None and pool.cache_salt is None
    (reply,) = await pool.generate(ModelInput(PROMPT), SAMPLING)
    assert reply.token_ids and reply.logprobs == [] and reply.start_version is None
    await pool.require_tokenizer(TokenizerProbe.of(tokenizer, "tiny"))
    with pytest.raises(ConfigError, match="tokenizer"):
        await pool.require_tokenizer(TokenizerProbe("other", "12", [1, 2, 3]))
    await pool.close()
