"""The arithmetic of a dry run against what torch and vLLM count: autograd's own hooks, an optimiser's state, blocks."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import QWEN3_32B, SMALL, batch

from prl.config.build import plain
from prl.config.lora import LoraConfig
from prl.config.schema import ModelConfig, PolicyModelConfig, VLLMConfig
from prl.tools.dry_run.memory import (
    Pass,
    activations,
    attended,
    engine_memory,
    kv_bytes_per_token,
    kv_tokens,
    trainer_memory,
)
from prl.tools.dry_run.shape import optimiser_bytes, shape_of, with_adapters
from prl.trainer.batch import stacks
from prl.trainer.layers import recompute_activations
from prl.trainer.lora import add_adapters
from prl.trainer.model import stack_logprobs
from prl.trainer.optim import make_optimizers
from prl.trainer.tree.attention import use_tree_attention
from prl.trainer.tree.blocks import BlockTree
from prl.trainer.tree.tree import tree_stacks

TOKENS = 1024
LORA = LoraConfig(rank=16)
EMBEDDING = SMALL["vocab_size"] * SMALL["hidden_size"]


def shape(folder, lora=None):
    """The shape of a folder's model, with adapters where they are given."""
    config = PolicyModelConfig(path=str(folder), lora=lora or LoraConfig())
    found, model = shape_of(config, "model.path", trained=True)
    return with_adapters(found, model, config) if lora else found


def storages(tensors):
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def reachable():
    """All tensors that Python has: what selective checkpointing keeps, hooks are not told. Not a compiler's fakes."""
    return storages(each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))


def kept(model, how, length):
    """Bytes that autograd keeps of a forward pass until its backward, each storage once"""
    if how.trees:
        use_tree_attention(model)
    recompute_activations(model, how.checkpointing)
    layout = tree_stacks if how.trees else stacks
    rows = batch(1, TOKENS, length, how.row, SMALL["vocab_size"]).micro_batches
    (stack,) = layout(rows, TOKENS, torch.device("cpu"))
    weights = storages(model.parameters())
    before, seen, alive = reachable(), {}, []

    def note(tensor):
        seen.update(storages([tensor]))
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        graph = stack_logprobs(model, stack, head_chunk=None)
    assert stack.forward_tokens == how.tokens and graph
    if how.checkpointing == "selective":
        seen |= {place: size for place, size in reachable().items() if place not in before}
    return sum(size for place, size in seen.items() if place not in weights)


@pytest.mark.parametrize(
    ("kind", "length", "settings", "lora"),
    [
        ("llama", 128, {}, None),
        ("qwen3", 512, {}, None),
        ("qwen3_moe", 512, {}, None),
        ("llama", 128, {"trees": False, "size": 2}, None),
        ("qwen3_moe", 512, {"checkpointing": "selective", "size": 2}, None),
        ("qwen3", 512, {"checkpointing": "full"}, None),
        ("qwen3", 512, {}, LORA),
        ("qwen3", 512, {"checkpointing": "selective"}, LORA),
    ],
    ids=str,
)
def test_activations_are_what_autograd_keeps(bare, built, kind, length, settings, lora):
    how = Pass(budget=TOKENS, length=length, row=max(length, 512), **settings)
    model = built(kind).bfloat16() if how.size == 2 else built(kind)
    if lora:
        add_adapters(model, plain(lora), "base")
    found = shape(bare(kind), lora)
    near = 0.4 if how.checkpointing == "full" else 0.06  # little is left, of which the layout of attention is a third
    assert activations(found, how) == pytest.approx(kept(model, how, length), rel=near)


@pytest.mark.parametrize("length", [100, 512, 4096])
def test_keys_of_attention_are_those_of_the_blocks(length):
    tree = BlockTree.of_row(np.arange(length), [0], torch.device("cpu"))
    _, keys, pairs = attended(Pass(budget=length, length=length + 1, row=length))
    assert keys == pytest.approx(sum(block.keys.numel() for block in tree.blocks), rel=0.15)
    assert pairs == pytest.approx(sum(b.keys.numel() * b.queries.shape[1] for b in tree.blocks), rel=0.15)


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen3", True), ("qwen3_moe", True)])
def test_parameters_are_the_models(bare, built, kind, tied):
    found = shape(bare(kind, tie_word_embeddings=tied))
    model = built(kind, tie_word_embeddings=tied)
    layer = sum(each.numel() for each in model.base_model.layers[0].parameters())
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert (found.layers, found.layer, found.tied) == (3, layer, tied)
    assert found.parameters == (1 if tied else 2) * EMBEDDING + 3 * layer + 240
    assert found.qk_norm == (kind != "llama")
    if kind == "qwen3_moe":
        assert layer > 16 * 3 * 120 * 240 and (found.routed, found.intermediate) == (4, 4 * 120)


@pytest.mark.parametrize(
    ("name", "settings", "floats"),
    [("AdamW", {}, 2), ("Adam", {"amsgrad": True}, 3), ("SGD", {}, 0), ("SGD", {"momentum": 0.9}, 1)],
)
def test_an_optimisers_state_is_what_a_real_step_makes(bare, built, name, settings, floats):
    node = {"_target_": f"torch.optim.{name}", "lr": 1e-3, **settings}
    config = ModelConfig(path=str(bare("llama")))
    found, model = shape_of(config, "model.path", trained=True)
    optimizer = make_optimizers(real := built("llama"), node)
    for parameter in real.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [each for of_one in optimizer.state.values() for each in of_one.values() if isinstance(each, torch.Tensor)]
    counted = optimiser_bytes(model, node)
    assert counted == sum(each.nbytes for each in state)
    assert 0 <= counted - 4 * floats * found.parameters <= 4 * len(list(real.parameters())), "and a count of steps"


def test_ranks_divide_states_and_not_activations(bare):
    found = shape(bare("llama"))
    how = Pass(budget=TOKENS, length=512, row=512)
    alone, shared = (
        trainer_memory(found, replace(how, spread=n > 1), optimiser=8000, reference=True, shards=n) for n in (1, 4)
    )
    assert alone["weights"] == alone["gradients"] == alone["reference"] == 4 * found.parameters
    assert alone["optimiser"] == 8000 and alone["gathered"] == 0
    for part in ("weights", "gradients", "optimiser", "reference"):
        assert shared[part] == alone[part] / 4
    for part in ("activations", "head"):
        assert shared[part] == alone[part]
    assert shared["gathered"] == 4 * (EMBEDDING + 240 + 3 * found.layer), "the embedding, a norm, layers"
    assert trainer_memory(found, how, optimiser=0)["reference"] == 0


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
