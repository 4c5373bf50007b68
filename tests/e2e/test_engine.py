"""The client pool against a real engine: tokens, logprobs, weight updates, memory."""

import asyncio
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig
from prl.engines.frozen import FrozenPool
from prl.engines.protocol import GENERATE
from prl.engines.vllm.engine import VLLMConfig
from prl.engines.vllm.memory import engine_memory, kv_tokens
from prl.models import model_path
from prl.rollouts.inputs import ModelInput
from prl.tools.dry_run.shape import shape_of

pytestmark = pytest.mark.engine

PROMPT = "12+34="
GREEDY = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def prompt_ids(tokenizer):
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def changed_weights(tmp_path_factory):
    """The tiny policy with every matrix moved, as a folder that the engine can load."""
    folder = tmp_path_factory.mktemp("changed")
    state = load_file(f"{model_path('tiny')}/model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, value in state.items():
        noise = torch.randn(value.shape, generator=generator) * 0.02
        state[name] = (value.float() + noise).contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((Path(model_path("tiny")) / file).read_bytes())
    return folder


def reference_logprobs(path: str, token_ids: list[int]) -> list[float]:
    """Logprob of each token but the first, from transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1).tolist()


def worst(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))


async def test_sampled_and_scored_logprobs_are_those_of_the_model(pool, prompt_ids):
    sampling = {"temperature": 1.0, "max_tokens": 8, "seed": 3}
    for completion in await pool.generate(ModelInput(prompt_ids), sampling, n=4):
        tokens = prompt_ids + completion.token_ids
        expected = reference_logprobs(model_path("tiny"), tokens)
        assert worst(completion.logprobs, expected[len(prompt_ids) - 1 :]) < 1e-4
        scored = await pool.prompt_logprobs(ModelInput(tokens))
        assert scored[0] == 0.0
        assert worst(scored[1:], expected) < 1e-4


async def test_a_frozen_model_is_scored_alike_by_prls_route_and_by_vllms(pool, prompt_ids, monkeypatch):
    reference, found = FrozenModelConfig(pool.model, f"{pool.urls[0]}/v1"), []
    for route in (GENERATE, "/prl/unknown"):
        monkeypatch.setattr("prl.engines.frozen.GENERATE", route)
        frozen, asked = FrozenPool(reference, pool.http.token), []
        request = frozen.http.request

        async def noted(method, url, route, *rest, asked=asked, request=request, **options):
            asked.append(route)
            return await request(method, url, route, *rest, **options)

        monkeypatch.setattr(frozen.http, "request", noted)
        found.append((await frozen.top_logprobs(ModelInput(prompt_ids), 5), asked))
        await frozen.close()
    (scored, by_prl), (other, by_vllm) = found
    assert other == scored
    assert (by_prl, by_vllm) == ([GENERATE, GENERATE], ["/prl/unknown", "/v1/completions"])
    expected = reference_logprobs(model_path("tiny"), prompt_ids)
    assert worst(scored.own[1:], expected) < 1e-4 and {len(ids) for ids in scored.ids[1:]} == {5}


async def test_logprobs_are_taken_after_the_temperature(pool, prompt_ids):
    sampling = {"temperature": 0.5, "max_tokens": 1, "seed": 5}
    (completion,) = await pool.generate(ModelInput(prompt_ids), sampling)
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids])).logits[0, -1]
    expected = (logits / 0.5).log_softmax(-1)[completion.token_ids[0]].item()
    assert completion.logprobs[0] == pytest.approx(expected, abs=1e-4)


async def test_a_seed_fixes_a_group_and_another_seed_changes_it(pool, prompt_ids):
    def tokens(completions):
        return [c.token_ids for c in completions]

    sampling = {"temperature": 1.0, "max_tokens": 8, "seed": 11}
    first = tokens(await pool.generate(ModelInput(prompt_ids), sampling, n=8))
    assert tokens(await pool.generate(ModelInput(prompt_ids), sampling, n=8)) == first
    assert tokens(await pool.generate(ModelInput(prompt_ids), {**sampling, "seed": 12}, n=8)) != first
    assert len({tuple(ids) for ids in first}) > 1


async def test_after_an_update_the_tied_head_is_the_new_one(pool, prompt_ids, changed_weights):
    tokens = prompt_ids + (await pool.generate(ModelInput(prompt_ids), GREEDY))[0].token_ids
    expected = reference_logprobs(str(changed_weights), tokens)
    assert worst(reference_logprobs(model_path("tiny"), tokens), expected) > 0.1  # the weights do differ
    await pool.update_weights(1, str(changed_weights))
    assert pool.version == 1
    assert worst((await pool.prompt_logprobs(ModelInput(tokens)))[1:], expected) < 1e-4


async def test_running_requests_are_kept_and_go_on_under_the_new_weights(pool, prompt_ids, changed_weights):
    long = {"temperature": 1.0, "max_tokens": 400, "ignore_eos": True, "seed": 2}
    running = asyncio.gather(*(pool.generate(ModelInput(prompt_ids), {**long, "seed": s}, n=8) for s in range(2)))
    await asyncio.sleep(0.3)
    assert not running.done()
    await pool.update_weights(1, str(changed_weights))
    completions = [c for group in await running for c in group]
    assert all(len(c.token_ids) == 400 and c.finish_reason == "length" for c in completions)
    assert {(c.start_version, c.end_version) for c in completions} == {(0, 1)}
    # The last tokens were sampled long after the update: the new policy's logprobs, so no old cache entry is in use.
    tokens = prompt_ids + completions[0].token_ids
    new = reference_logprobs(str(changed_weights), tokens)
    assert worst(completions[0].logprobs[-50:], new[-50:]) < 1e-3


async def test_no_prefix_cached_under_older_weights_is_used(pool, prompt_ids, changed_weights):
    shared = prompt_ids * 12  # long enough to fill cache blocks
    await pool.generate(ModelInput(shared), GREEDY)
    await pool.update_weights(1, str(changed_weights))
    pool.version = 0  # the salt of before: the server itself has to forget
    (completion,) = await pool.generate(ModelInput(shared), {"temperature": 1.0, "max_tokens": 4, "seed": 1})
    expected = reference_logprobs(str(changed_weights), shared + completion.token_ids)
    assert worst(completion.logprobs, expected[len(shared) - 1 :]) < 1e-4


async def test_a_dry_run_knows_the_kv_cache(pool, server_logs):
    log = (server_logs / "engine.log").read_text()
    size = r"KV cache size: ([\d,]+) tokens, .* for (\d+) tokens .*: ([\d.]+)x"
    tokens, longest, sequences = re.findall(size, log)[0]
    model = ModelConfig(path=model_path("tiny"), dtype="float32", max_model_len=int(longest))
    shape = shape_of(model, "model.path", trained=True)
    parts = engine_memory(shape, "float32", VLLMConfig(device="cpu"), share=None, updated=True)
    counted = kv_tokens(shape, "float32", "cpu", parts["KV cache"])
    assert counted == int(tokens.replace(",", ""))
    assert counted / int(longest) == float(sequences)
