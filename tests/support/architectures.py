"""Small random models of the architectures in experiments/benchmarks/architectures.md; a step of two ranks on them."""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prl.config.trainer import AdamWConfig
from prl.losses import default_loss
from prl.models import model_path
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.trainer.lora import add_adapters
from prl.trainer.model import load_model, save_weights
from prl.trainer.trainer import Trainer

SIZES: dict[str, Any] = {
    "vocab_size": 304,  # of the tiny model's tokenizer, whose files these have
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # at the usual 0.02 all tokens are about as likely, whatever is before them
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2}
MAMBA = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1}


@dataclass(frozen=True)
class Architecture:
    kind: str
    """transformers' `model_type`."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Where they differ from `SIZES`."""
    refused: str = ""
    """What prl says of it, where it does not train it."""


ARCHITECTURES = {
    "Qwen3": Architecture("qwen3"),
    "Llama": Architecture("llama"),
    "Gemma 3": Architecture("gemma3_text", WINDOW),
    "GLM-4": Architecture("glm4"),
    "Qwen3-MoE": Architecture("qwen3_moe", EXPERTS | {"num_experts": 8}),
    "GLM-4-MoE": Architecture("glm4_moe", EXPERTS | {"n_routed_experts": 8, "first_k_dense_replace": 1}),
    "gpt-oss": Architecture("gpt_oss", WINDOW | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Gemma 2": Architecture("gemma2", WINDOW, "sets final_logit_softcapping"),
    "Qwen3.5": Architecture("qwen3_5_text", HYBRID, "layers of kind linear_attention"),
    "Nemotron-H": Architecture("nemotron_h", MAMBA, "layers of kind linear_attention"),
    "GLM-5": Architecture("glm_moe_dsa", EXPERTS | {"n_routed_experts": 4}, "layers of kind deepseek_sparse_attention"),
}
PHI = Architecture("phi3", {"num_attention_heads": 2, "num_key_value_heads": 1})
"""Phi 3.5 by its `longrope`; the table has none of it."""
TRAINED = [name for name, each in ARCHITECTURES.items() if not each.refused]
MIXTURES = [name for name in TRAINED if "MoE" in name or name == "gpt-oss"]
SERVED = {
    "Qwen3": "untied",
    "Llama": "tied",
    "Gemma 3": "tied",
    "GLM-4": "untied",
    "Qwen3-MoE": "untied",
    "GLM-4-MoE": "untied",
    "gpt-oss": "untied",
}
"""The head of those that tests/engines/test_worker.py has an engine serve; Qwen3 with a tied one is model=tiny."""
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [1.2, 30.0] * 8}
REFUSED = [name for name, each in ARCHITECTURES.items() if each.refused]


def config_of(name: str, *, tied: bool, **sizes: Any) -> Any:
    """The config of an architecture."""
    own = PHI if name == "Phi-3" else ARCHITECTURES[name]
    return AutoConfig.for_model(own.kind, **SIZES | own.sizes | sizes | {"tie_word_embeddings": tied})


def longrope(original: int, **settings: Any) -> dict[str, Any]:
    """Sizes of a Phi-3 with short factors for up to `original` of its 512 positions."""
    rope = LONGROPE | {"original_max_position_embeddings": original} | settings
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def write_model(folder: Path, name: str, *, tied: bool, seed: int = 0, **sizes: Any) -> Path:
    """A model folder with random float32 weights, as transformers writes it, and the tiny model's tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name, tied=tied, **sizes), attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:  # norms begin as nothing, and biases
                tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    for file in Path(model_path("tiny")).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def give_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """The model with adapters that change it."""
    torch.manual_seed(0)
    add_adapters(model, {"rank": 4, "alpha": 8.0, "target_modules": None}, "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def samples() -> list[TrainingSample]:
    """Two groups of three with a common prompt of 9 tokens, and completions of different lengths."""
    draw, found = random.Random(0), []
    for number in range(6):
        prompt = [(37 * place + 11 * (number // 3)) % 250 for place in range(9)]
        on = [0.0] * 9 + [1.0] * (5 + number)
        found.append(
            TrainingSample(
                token_ids=prompt + [draw.randrange(250) for _ in range(5 + number)],
                mask=[bool(each) for each in on],
                logprobs=[-5.7 * each for each in on],
                temperatures=[1.0] * len(on),
                env_name="x",
                reward=0.0,
                advantages=[draw.choice([-1.0, 0.5]) * each for each in on],
            )
        )
    return found


def step(folder: Path, rank: int = 0, ranks: int = 1, **others: Any) -> tuple[Trainer, dict[str, float]]:
    """The trainer of a model folder after one step, and its metrics."""
    model = load_model(str(folder), device=torch.device("meta" if rank else "cpu"))
    options = {"device": "cpu", "optim": AdamWConfig(lr=1e-3, eps=1e-4)} | others
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=1, **options)
    rows, _ = pack(samples(), 64, ranks)
    return trainer, trainer.train_step(StepBatch(1, rows[rank], 0))


def main(folder: Path, names: list[str], rank: int) -> None:
    """One of two ranks: a step on each model in `folder`, whose weights then are in `<name> of two`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for name in names:
        trainer, _ = step(folder / name, rank, 2)
        save_weights(trainer.model, None if rank else folder / f"{name} of two", torch.float32)
    dist.destroy_process_group()
