"""An engine that has loaded weights answers as one that was started with them.

Each architecture is vLLM's own, in a process of its own; greedy tokens and every logprob are compared exactly.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import policy_spec
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from prl.launch.local import engine_environment

SMALL = {
    "vocab_size": 304,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
}
MODELS: dict[str, PreTrainedConfig] = {
    "tied": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "untied, biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    "experts, sinks": GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, tie_word_embeddings=False
    ),
}
COPIED = ["experts, sinks"]
"""Those that copy weights into place without a loader, which vLLM's reload loses."""

CODE = """
import json
import sys
from pathlib import Path

import torch

from vllm import LLM, SamplingParams

PROMPT = {"prompt_token_ids": list(range(3, 60))}
GREEDY = SamplingParams(max_tokens=16, temperature=0, prompt_logprobs=0, logprobs=0, detokenize=False)


def engine(path):
    return LLM(
        model=path, dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=512,
        max_num_seqs=8, enforce_eager=True, enable_chunked_prefill=False, enable_prefix_caching=False,
        distributed_executor_backend="uni", worker_extension_cls="prl.engines.vllm.worker.PolicyWorker",
    )


def answer(llm):
    [reply] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    tokens = [*reply.prompt_token_ids[1:], *reply.outputs[0].token_ids]
    found = [*reply.prompt_logprobs[1:], *reply.outputs[0].logprobs]
    return [(token, known[token].logprob) for token, known in zip(tokens, found, strict=True)]


def load(llm, path):
    try:
        llm.collective_rpc("load_policy", args=(path,))
    except Exception as error:
        return str(error)


def reload(llm, path):  # as an engine does that cannot load in place
    llm.collective_rpc(lambda wrapper: vars(wrapper.worker).update(packed_layers=None))
    error = load(llm, path)
    llm.collective_rpc(lambda wrapper: vars(wrapper.worker).update(halfway=False))
    return {"error": error, "answer": error or answer(llm)}


old, new, broken, out = sys.argv[1:]
fresh = answer(engine(new))
llm = engine(old)
found = {"fresh": fresh, "before": answer(llm)}
load(llm, new)
found["after"] = answer(llm)
load(llm, old)
found["back"] = answer(llm)
found["reloaded"] = reload(llm, new)
found["error"] = load(llm, broken)
found["for good"] = load(llm, new)
Path(out).write_text(json.dumps(found), encoding="utf-8")
"""


def saved(config: PreTrainedConfig, folder: Path, seed: int) -> Path:
    """A model with random weights, biases and norms too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def with_a_stranger(folder: Path, broken: Path) -> Path:
    """Weights that fail when most of them have been loaded."""
    broken.mkdir()
    tensors = load_file(folder / "model.safetensors") | {"z.weight": torch.ones(1)}
    save_file(tensors, broken / "model.safetensors")
    return broken


@pytest.fixture
def loaded(tmp_path):
    """`loaded(config)`: what `CODE` says of an engine of that architecture."""

    def run(config: PreTrainedConfig) -> dict:
        old, new = (saved(config, tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
        broken, printed = with_a_stranger(old, tmp_path / "broken"), tmp_path / "said.json"
        spec = replace(policy_spec("", tmp_path / "log"), frozen=True)
        environment = os.environ | engine_environment(spec) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [sys.executable, "-c", CODE, *map(str, (old, new, broken, printed))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(printed.read_text(encoding="utf-8"))

    return run


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_that_has_loaded_weights_is_one_that_was_started_with_them(loaded, name):
    found = loaded(MODELS[name])
    assert worst(found["before"], found["fresh"]) > 0.1, "the weights do differ"
    assert found["after"] == found["fresh"] and found["back"] == found["before"]
    if name in COPIED:
        assert "does not take" in found["reloaded"]["error"] and "sinks" in found["reloaded"]["error"]
    else:
        assert found["reloaded"] == {"error": None, "answer": found["fresh"]}
    assert "z" in found["error"] and "start the engine again" in found["for good"], "what failed half-way stays so"


def worst(one: list, other: list) -> float:
    """The largest difference of logprobs."""
    return max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True))
