"""Models whose frequencies of positions transformers chooses by the longest sequence of a forward.

That vLLM has the same frequencies is in tests/engines/test_worker.py.
"""

import asyncio
import contextlib

import pytest
import torch
from architectures import LONGROPE, config_of, longrope, write_model
from prepared_run import prepared_run
from transformers import AutoConfig, AutoModelForCausalLM

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.engines.rope import check_rope
from prl.engines.transformers import TransformersConfig, TransformersEngine
from prl.rollouts.inputs import ModelInput
from prl.trainer.batch import stacks
from prl.trainer.model import _row, check_layout, load_model, stack_logprobs

CPU = torch.device("cpu")
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
SLIDING = {"rope_type": "default", "rope_theta": 1e4}
SHORT, LONG = list(range(10, 34)), list(range(20, 240))
LENGTH = 256


@torch.no_grad()
def logprobs_alone(folder, factors, tokens):
    """Of a model that has `factors` at any length, in transformers alone."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters |= {"short_factor": LONGROPE[factors], "long_factor": LONGROPE[factors]}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize(("original", "factors"), [(LENGTH, "short_factor"), (64, "long_factor")])
async def test_trainer_and_engine_have_the_factors_of_max_model_len(tmp_path, original, factors):
    """For each sequence, whatever is beside it."""
    folder = write_model(tmp_path / "model", "Phi-3", tied=False, **longrope(original))
    expected = [logprobs_alone(folder, factors, tokens) for tokens in (SHORT, LONG)]
    model = load_model(str(folder), device=CPU, max_model_len=LENGTH)
    check_layout(model, stacks, max_model_len=LENGTH)
    [stack] = stacks([_row(ModelInput(SHORT), ModelInput(LONG))], 1 << 12, CPU)
    found = stack_logprobs(model, stack, head_chunk=None)[0].detach().split(stack.sequence_lengths)
    for own, logprobs in zip(found, expected, strict=True):
        assert own[4:].tolist() == pytest.approx(logprobs[3:].tolist(), abs=2e-5)
    spec = ModelConfig(path=str(folder), dtype="float32", max_model_len=LENGTH)
    engine = EngineSpec("engine", "policy", spec, TransformersConfig(), "cpu", 0, "token", tmp_path / "log")
    pool = TransformersEngine.policy(engine, lambda spec: [])
    try:
        await pool.wait_ready(60)
        scored = await asyncio.gather(pool.prompt_logprobs(ModelInput(SHORT)), pool.prompt_logprobs(ModelInput(LONG)))
        sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
        sampled = await asyncio.gather(
            pool.generate(ModelInput(SHORT), sampling), pool.generate(ModelInput(LONG), sampling)
        )
    finally:
        await pool.close()
    for own, logprobs in zip(scored, expected, strict=True):
        assert own[1:] == pytest.approx(logprobs.tolist(), abs=2e-5)
    for prompt, [reply] in zip((SHORT, LONG), sampled, strict=True):
        after = logprobs_alone(folder, factors, prompt + reply.token_ids)[len(prompt) - 1 :]
        assert reply.logprobs == pytest.approx(after.tolist(), abs=2e-5)


def test_dynamic_frequencies_stay_those_of_its_own_positions(tmp_path):
    """Whatever comes by: transformers would scale them for a longer sequence."""
    folder = write_model(tmp_path / "model", "Llama", tied=True, rope_parameters=DYNAMIC | {"factor": 1.5})
    model = load_model(str(folder), device=CPU, max_model_len=512)
    check_layout(model, stacks, max_model_len=700)


@pytest.mark.parametrize(
    ("name", "rope", "longest", "limit"),
    [
        ("Llama", DYNAMIC, 512, None),
        ("Llama", DYNAMIC, 513, 512),
        ("Llama", {"type": "dynamic", "factor": 4.0}, 513, 512),
        ("Llama", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 2048, None),
        ("Gemma 3", {"full_attention": DYNAMIC, "sliding_attention": SLIDING}, 513, 512),
        ("Phi-3", longrope(64)["rope_parameters"], 512, None),
        ("Phi-3", longrope(64, factor=8.0)["rope_parameters"], 512, None),
        ("Phi-3", longrope(64, factor=2.0)["rope_parameters"], 65, 64),
        ("Phi-3", longrope(64, attention_factor=1.1)["rope_parameters"], 65, 64),
        ("Phi-3", longrope(64, attention_factor=1.1)["rope_parameters"], 64, None),
    ],
)
def test_frequencies_that_cannot_be_fixed_are_refused_by_name(name, rope, longest, limit):
    own = {"original_max_position_embeddings": 64} if name == "Phi-3" else {}
    config = config_of(name, tied=True, rope_parameters=rope, **own)
    message = rf"^x: its config has rope_type=\w+, .*: set model.max_model_len={limit} or less$"
    with pytest.raises(ValueError, match=message) if limit else contextlib.nullcontext():
        check_rope(config, longest, "x")


def test_a_run_is_refused_before_it_starts(tmp_path):
    folder = write_model(tmp_path / "model", "Llama", tied=True, rope_parameters=DYNAMIC)
    with pytest.raises(ConfigError, match=r"^model.path=.*rope_type=dynamic, .* set model.max_model_len=512 or less"):
        prepared_run(compose(["run.name=x", "model=hf", f"model.path={folder}", "engine.device=cpu"]))


@pytest.mark.parametrize(
    ("name", "sizes"), [("Llama", {"rope_parameters": DYNAMIC}), ("Phi-3", longrope(64))], ids=["dynamic", "longrope"]
)
def test_check_layout_notices_frequencies_that_follow_the_longest_sequence(tmp_path, name, sizes):
    """As in a model with code of its own, whose frequencies nobody fixes."""
    folder = write_model(tmp_path / "model", name, tied=False, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.rope_parameters["rope_type"] = "linear"  # or `positions` would be those of the config
    with pytest.raises(ValueError, match="by the longest sequence .here 600 tokens; try a lower model.max_model_len"):
        check_layout(model, stacks, max_model_len=600)
