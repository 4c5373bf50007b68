"""Sizes of small models, batches of random sequences, and an optimiser, for tests of dry runs."""

import random

from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 240,
    "intermediate_size": 700,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 120}
QWEN3_32B = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
SIZES = {"llama": SMALL, "qwen3": SMALL, "qwen3_moe": SMALL | EXPERTS}
PROMPT = 32


def batch(step: int, tokens: int, length: int, row: int, vocabulary: int) -> StepBatch:
    """Sequences of `length`, of `tokens` in all, in rows of `row`."""
    rng = random.Random(step)
    mask = [place >= PROMPT for place in range(length)]
    samples = [
        TrainingSample(
            token_ids=[rng.randrange(vocabulary) for _ in mask],
            mask=mask,
            logprobs=[-8.0 * on for on in mask],
            temperatures=[1.0] * length,
            env_name="x",
            reward=0.0,
            advantages=[rng.choice((-1.0, 1.0)) * on for on in mask],
        )
        for _ in range(tokens // length)
    ]
    return StepBatch(step, pack(samples, row, 1)[0][0], 0)
