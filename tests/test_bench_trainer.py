"""What the figures of scripts/bench_trainer are made of."""

from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from prl.trainer.tree.tree import tree_stacks

BENCH = SourceFileLoader("bench_trainer", str(Path(__file__).parents[1] / "scripts" / "bench_trainer")).load_module()
CPU = torch.device("cpu")


def test_the_arithmetic_is_what_torch_counts():
    """Of the products of a layer's matrices, forward and backward; pairs of tokens as a triangle."""
    model = BENCH.make_model(BENCH.config_of("tiny"), 64, CPU)
    arithmetic, config = BENCH.Arithmetic(model), model.config
    (stack,) = tree_stacks(BENCH.documents(1, 33, 300, -5.0), 64, CPU, share=False)
    with FlopCounterMode(display=False) as counted:
        model.base_model(input_ids=stack.input_ids, use_cache=False).last_hidden_state.sum().backward()
    products = counted.get_flop_counts()["Global"]
    assert products[torch.ops.aten.mm] == 6 * arithmetic.matrices * 32
    queries = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    head = config.vocab_size * config.hidden_size
    trained, pairs = 33 - 16, 32 * 33 // 2
    assert arithmetic.of([stack]) == products[torch.ops.aten.mm] + 6 * head * trained + 12 * queries * pairs
