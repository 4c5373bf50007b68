"""What vLLM samples of small models, each in an engine as prl starts one: python served_models.py JOBS OUT

A job is the arguments of the engine and two folders of weights: the ones that it starts with, and later ones. One
process has all engines one after another, so that vLLM is imported once.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

from vllm import LLM, EngineArgs, SamplingParams
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from prl.engines.vllm import cpu

PROMPTS = [list(range(10, 40)), list(range(60, 75))]
SAMPLING = {"n": 4, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 0, "detokenize": False}


def engine(arguments: list[str]) -> LLM:
    """The engine of a server's command line, in this process."""
    parsed = EngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments))
    return LLM(**{field.name: getattr(parsed, field.name) for field in fields(parsed)})


def samples(llm: LLM) -> list[dict]:
    """Four replies to each prompt, with the logprobs that they were sampled with."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    llm.reset_prefix_cache()
    replies = llm.generate(prompts, [SamplingParams(**SAMPLING, seed=3)] * len(prompts), use_tqdm=False)
    return [
        {
            "prompt": list(reply.prompt_token_ids),
            "tokens": list(completion.token_ids),
            "logprobs": [row[token].logprob for token, row in zip(completion.token_ids, completion.logprobs)],
        }
        for reply in replies
        for completion in reply.outputs
    ]


def load(llm: LLM, folder: str) -> str | None:
    """Load weights. Returns what the engine says against them."""
    try:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": folder}})
        llm.finish_weight_update()
    except Exception as error:
        return str(error)
    return None


def reload(llm: LLM, folder: str) -> str | None:
    """As `load`, of an engine that cannot load in place."""
    llm.collective_rpc(lambda wrapper: vars(wrapper.worker.weight_transfer_engine.update).update(packed=None))
    error = load(llm, folder)
    llm.collective_rpc(lambda wrapper: vars(wrapper.worker.weight_transfer_engine).update(halfway=False))
    return error


def observe(arguments: list[str], old: str, new: str, broken: str) -> dict:
    """What an engine samples from the old weights, the new ones, the old ones again, and the new ones reloaded."""
    llm = engine(arguments)
    found: dict = {"old": samples(llm)}
    found["errors"] = [load(llm, new)]
    found["new"] = samples(llm)
    found["errors"].append(load(llm, old))
    found["back"] = samples(llm)
    found["reload error"] = reload(llm, new)
    found["reloaded"] = None if found["reload error"] else samples(llm)
    found["broken"], found["after broken"] = load(llm, broken), load(llm, new)
    return found


if __name__ == "__main__":
    jobs, out = map(Path, sys.argv[1:])
    cpu.install()
    out.write_text(json.dumps({name: observe(**job) for name, job in json.loads(jobs.read_text()).items()}))
