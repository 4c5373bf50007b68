"""The command line and environment of a policy server."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from prl.config.compose import compose
from prl.config.hardware import Machine, MachineConfig
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.engines.vllm.command import MIN_BATCHED_TOKENS
from prl.engines.vllm.engine import VLLMConfig, VLLMEngine
from prl.engines.vllm.server import LIVE, REQUIRED
from prl.launch.plan import plan

MODEL = {"path": "/models/m", "dtype": "float32", "max_model_len": 1024, "trust_remote_code": False}


def spec(device="cpu", model=None, **config):
    return EngineSpec(
        process="engine",
        served_name="policy",
        model=ModelConfig(**MODEL | (model or {})),
        config=VLLMConfig(**config),
        device=device,
        seed=7,
        token="t0ken",
        log=Path("engine.log"),
    )


def command(*given, **config):
    return VLLMEngine.command(spec(*given, **config), 8123)


def option(found, name):
    assert found.count(name) == 1, found
    return found[found.index(name) + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_every_server_gets(device):
    found = command(device, host="::1", max_num_seqs=33)
    assert found[:3] == [sys.executable, "-m", "prl.engines.vllm.server"]
    expected = {
        "--model": "/models/m",
        "--served-model-name": "policy",
        "--host": "::1",
        "--port": "8123",
        "--seed": "7",
        "--dtype": "float32",
        "--max-model-len": "1024",
        "--max-num-seqs": "33",
        "--logprobs-mode": "processed_logprobs",
    }
    assert {name: option(found, name) for name in expected} == expected
    assert "--trust-remote-code" not in found
    assert all(isinstance(word, str) for word in found)


def test_whole_prompts_fit_into_one_prefill_on_a_cpu():
    """A seeded request whose prompt is prefilled in chunks kills the engine there."""
    for length in (64, 1024, 32768):
        found = command("cpu", model={"max_model_len": length})
        assert "--no-enable-chunked-prefill" in found
        assert int(option(found, "--max-num-batched-tokens")) == max(length, MIN_BATCHED_TOKENS)


PARSED = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    print(json.dumps(vars(parser.parse_args(words)), default=lambda value: getattr(value, "__dict__", str(value))))
"""


@pytest.mark.slow
def test_vllms_parser_takes_the_commands_of_engines_on_gpus(tmp_path):
    """Nothing here starts one: a flag that this vLLM does not know would be found on a GPU alone."""
    options = ("engine.servers=2", "engine.tensor_parallel_size=2", "engine.gpu_memory_utilization=0.7")
    given = ("+engine.args.enable-prefix-caching=true", "+engine.args.block-size=16")
    more = ("model.lora.rank=8", "engine.device=cuda", "trainer.device=cuda")
    config = compose(["run.name=x", *options, *given, *more])
    engines = plan(config, Machine(MachineConfig(gpus=5))).policy.servers
    words = [VLLMEngine.command(engine, 8000 + number)[3:] for number, engine in enumerate(engines)]
    words = [[*each, *REQUIRED, *LIVE] for each in words] + [[*words[0], *REQUIRED]]  # the last as of a teacher

    own = [*words[0], "--hf-overrides", '{"head_dtype": "model"}']
    commands = json.dumps([*words, own, [*words[0], "--no-such-flag"]])
    argv, env = [sys.executable, "-c", PARSED], os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(argv, input=commands, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.rstrip().endswith("unrecognized arguments: --no-such-flag")
    *found, changed = map(json.loads, done.stdout.splitlines())
    assert changed["hf_overrides"] == {"head_dtype": "model"}, "the last one counts"
    assert [each["port"] for each in found] == [8000, 8001, 8000]
    for each in found:
        assert (each["tensor_parallel_size"], each["gpu_memory_utilization"], each["dtype"]) == (2, 0.7, "bfloat16")
        assert (each["block_size"], each["enable_prefix_caching"], each["host"]) == (16, True, "127.0.0.1")
        assert each["enable_scale_out"] and each["middleware"] == ["prl.engines.vllm.server.TokenAuth"]
        assert each["hf_overrides"] == {"head_dtype": "float32"}
        assert not each["enable_lora"], "adapters are merged into what the engines get"
    assert [bool(each["worker_extension_cls"]) for each in found] == [True, True, False]


@pytest.mark.parametrize(("dtype", "given"), [("float32", False), ("bfloat16", True), ("float16", True)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_are_in_float32_unless_the_user_says_otherwise(device, dtype, given):
    found = command(device, model={"dtype": dtype})
    assert ("--hf-overrides" in found) == given
    if given:
        assert option(found, "--hf-overrides") == '{"head_dtype": "float32"}'
    own = '{"head_dtype": "model"}'
    for spelt in ("hf-overrides", "hf_overrides"):
        found = command(device, model={"dtype": dtype}, args={spelt: own})
        assert [value for name, value in pairwise(found) if name == "--hf-overrides"][-1] == own, "the last one counts"


def test_further_arguments():
    plain = command()
    found = command(
        args={"enable-prefix-caching": True, "async_scheduling": False, "block-size": 16, "quantization": "fp8"}
    )
    assert found[: len(plain)] == plain
    assert found[len(plain) :] == [
        "--enable-prefix-caching",
        "--no-async-scheduling",
        "--block-size",
        "16",
        "--quantization",
        "fp8",
    ]


def test_environment():
    cpu = VLLMEngine.environment(spec(kv_cache_gb=3))
    assert cpu["VLLM_CPU_KVCACHE_SPACE"] == "3" and cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert cpu["TORCHDYNAMO_DISABLE"] == "1", "nothing is compiled while the first request waits"
    assert "TORCHDYNAMO_DISABLE" not in VLLMEngine.environment(spec(args={"enforce_eager": False}))
    assert cpu["PRL_CPU_PATCHES"] and not VLLMEngine.environment(spec(cpu_patches=False))["PRL_CPU_PATCHES"]
    cuda = VLLMEngine.environment(spec("cuda"))
    of_cpu = {"TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "PRL_CPU_PATCHES"}
    assert not of_cpu & cuda.keys()
    for found in (cpu, cuda):
        assert (found["PRL_TOKEN"], found["PRL_FROZEN"]) == ("t0ken", "")
        assert all(isinstance(value, str) for value in found.values())
