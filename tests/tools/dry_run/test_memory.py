"""The arithmetic of a dry run against what torch and vLLM count: autograd's own hooks, an optimiser's state, blocks."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from seeing import SEEING, config_of, picture_of
from small_models import QWEN3_32B, SMALL, batch
from transformers import AutoModelForImageTextToText

from prl.config.build import plain
from prl.config.schema import LoraConfig, ModelConfig
from prl.engines.vllm.engine import VLLMConfig
from prl.engines.vllm.memory import engine_memory, kv_bytes_per_token, kv_tokens
from prl.tools.dry_run.memory import Pass, activations, floats_of_patch, trainer_memory
from prl.tools.dry_run.shape import shape_of, vision_of
from prl.trainer.layers import recompute_activations
from prl.trainer.lora import add_adapters
from prl.trainer.model import stack_logprobs
from prl.trainer.tree.attention import use_tree_attention
from prl.trainer.tree.tree import tree_stacks

TOKENS = 1024
LORA = LoraConfig(rank=16)
EMBEDDING = SMALL["vocab_size"] * SMALL["hidden_size"]


def shape(folder, lora=None):
    """The shape of a folder's model, with adapters where they are given."""
    return shape_of(ModelConfig(path=str(folder)), "model.path", lora=lora, trained=True)


def storages(tensors):
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def reachable():
    """All tensors that Python has: what selective checkpointing keeps, hooks are not told. Not a compiler's fakes."""
    return storages(each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))


def kept(model, how, length):
    """Bytes that autograd keeps of a forward pass until its backward, each storage once"""
    use_tree_attention(model)
    recompute_activations(model, how.checkpointing)
    rows = batch(1, TOKENS, length, max(length, 512), SMALL["vocab_size"]).micro_batches
    (stack,) = tree_stacks(rows, TOKENS, torch.device("cpu"))
    return kept_by(lambda: stack_logprobs(model, stack, head_chunk=None), model, how.checkpointing)


def kept_by(forward, model, checkpointing):
    """Bytes that autograd keeps of a forward of a model."""
    weights = storages(model.parameters())
    before, seen, alive = reachable(), {}, []

    def note(tensor):
        seen.update(storages([tensor]))
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        graph = forward()
    assert graph
    if checkpointing == "selective":
        seen |= {place: size for place, size in reachable().items() if place not in before}
    return sum(size for place, size in seen.items() if place not in weights)


@pytest.mark.parametrize(
    ("kind", "length", "settings", "lora"),
    [
        ("llama", 128, {}, None),
        ("qwen3", 512, {}, None),
        ("qwen3_moe", 512, {}, None),
        ("qwen3_moe", 512, {"checkpointing": "selective", "size": 2}, None),
        ("qwen3", 512, {}, LORA),
        ("qwen3", 512, {"checkpointing": "selective"}, LORA),
    ],
    ids=str,
)
def test_activations_are_near_what_autograd_keeps(bare, built, kind, length, settings, lora):
    how = Pass(tokens=TOKENS, length=length, **settings)
    model = built(kind).bfloat16() if how.size == 2 else built(kind)
    if lora:
        add_adapters(model, plain(lora), "base")
    found = shape(bare(kind), lora)
    of_layers = activations(found, how) - activations(replace(found, layers=0), how)
    assert of_layers == pytest.approx(kept(model, how, length), rel=0.25)


@pytest.mark.parametrize("kind", SEEING)
def test_the_towers_activations_are_near_what_autograd_keeps(kind):
    config = config_of(kind)
    vision = config.vision_config
    vision.hidden_size, vision.intermediate_size, vision.attention_dropout = 240, 700, 0.0
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").train()
    made = [picture_of(config, seed)[1] for seed in range(20)]
    inputs = {name: torch.from_numpy(np.concatenate([each[name] for each in made])) for name in made[0]}
    patches = 9 * len(made) if kind == "llava" else len(inputs["pixel_values"])
    kept = kept_by(lambda: model.base_model.get_image_features(**inputs, return_dict=True), model, "none")
    assert patches * 4 * floats_of_patch(vision_of(config, model), "none") == pytest.approx(kept, rel=0.3)


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen3", True), ("qwen3_moe", True)])
def test_parameters_are_the_models(bare, built, kind, tied):
    found = shape(bare(kind, tie_word_embeddings=tied))
    model = built(kind, tie_word_embeddings=tied)
    layer = sum(each.numel() for each in model.base_model.layers[0].parameters())
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert (found.layers, found.layer) == (3, layer)
    assert found.parameters == (1 if tied else 2) * EMBEDDING + 3 * layer + 240
    if kind == "qwen3_moe":
        assert layer > 16 * 3 * 120 * 240 and (found.routed, found.intermediate) == (4, 4 * 120)


def test_ranks_divide_states_and_not_activations(bare):
    found = shape(bare("llama"))
    how = Pass(tokens=TOKENS, length=512)
    alone, shared = (trainer_memory(found, replace(how, spread=n > 1), references=1, shards=n) for n in (1, 4))
    assert alone["weights"] == alone["gradients"] == alone["reference"] == 4 * found.parameters
    assert alone["optimiser"] == 8 * found.parameters and alone["gathered"] == 0
    for part in ("weights", "gradients", "optimiser", "reference"):
        assert shared[part] == alone[part] / 4
    for part in ("activations", "head"):
        assert shared[part] == alone[part]
    assert shared["gathered"] == 4 * (EMBEDDING + 240 + 3 * found.layer), "the embedding, a norm, layers"
    assert trainer_memory(found, how)["reference"] == 0


def test_kv_bytes_are_vllms_own(bare):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    found = shape(bare())
    for dtype in ("float32", "bfloat16"):
        spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=40, dtype=getattr(torch, dtype))
        assert kv_bytes_per_token(found, dtype) * 128 == 3 * spec.page_size_bytes
    one = 3 * 2 * 2 * 40 * 4
    assert kv_bytes_per_token(found, "float32") == one
    assert kv_bytes_per_token(found, "float32", 2) == kv_bytes_per_token(found, "float32", 4) == one / 2, "one head"
    for bytes_there, tokens in ((3 * 128 * one, 384), (3 * 128 * one - 1, 256)):
        assert kv_tokens(found, "float32", "cpu", bytes_there) == tokens


def test_a_cpu_engine_loads_weights_beside_the_old_ones(bare):
    """SmolLM2-135M in float32, 538 MB: 1.44 GB before the first update, 2.68 GB at most in eight."""
    found = shape(bare())
    frozen = engine_memory(found, "float32", VLLMConfig(), share=None, updated=False)
    policy = engine_memory(found, "float32", VLLMConfig(), share=None, updated=True)
    assert frozen["update"] == 0 and policy["update"] == 2 * policy["weights"] == 2 * 4 * found.parameters
    assert policy | {"update": 0} == frozen


def test_a_gpu_engine_gives_its_cache_the_rest(bare):
    found = shape(bare("qwen3", **QWEN3_32B))
    spread = VLLMConfig(tensor_parallel_size=8)
    parts = engine_memory(found, "bfloat16", spread, share=40 << 30, updated=True)
    assert parts["weights"] == found.parameters * 2 / 8
    assert sum(parts.values()) == 40 << 30
    assert engine_memory(found, "bfloat16", VLLMConfig(), share=40 << 30, updated=True)["KV cache"] == 0
