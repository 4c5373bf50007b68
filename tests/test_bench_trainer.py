"""scripts/bench_trainer end to end on a CPU, with few tokens: its table, and what its figures are made of."""

import re
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from prl.trainer.tree import tree_stacks

BENCH = SourceFileLoader("bench_trainer", str(Path(__file__).parents[1] / "scripts" / "bench_trainer")).load_module()
CPU = torch.device("cpu")


def test_it_runs_on_a_cpu(capsys):
    """Two sequences of 64, 48 in a second table's row; two groups of 8 with a prompt of 32 and completions of 5."""
    BENCH.main(["--tokens", "64", "48", "--steps", "1", "--matrix", "64"])
    said = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")][1:]
    assert [row[:3] for row in rows] == [
        ["row of 64", "128", "126"],
        ["row of 48", "96", "94"],
        ["group alone", "592", "576"],
        ["group tree", "592", "128"],
    ]
    (matrix,) = re.findall(r"matrix rate: ([\d.e-]+) TFLOP/s", said)
    for _, tokens, _, *cells in rows:
        seconds, speed, rate, share, peak = (float(each.strip("%").replace(",", "")) for each in cells)
        assert speed == pytest.approx(int(tokens) / seconds, rel=0.02) and 0.01 < peak < 100
        assert share == pytest.approx(100 * rate / float(matrix), rel=0.02, abs=0.06)
    promised, saved, of_it = re.findall(r"tree: ([\d.]+)% promised, (-?[\d.]+)% saved: (-?\d+)% of it", said)[0]
    assert float(promised) == 77.8
    assert float(saved) == pytest.approx(100 - 100 * float(rows[3][3]) / float(rows[2][3]), abs=1)
    assert int(of_it) == pytest.approx(100 * float(saved) / 77.8, abs=1)
    assert re.search(r"update: [\d.]+ s for 1\.7 MB; the stand-in has the weights: True", said)
    most, mean, count = re.findall(r"gap: ([\d.]+) at most, ([\d.]+) in the mean, of (\d+) logprobs", said)[0]
    assert 0 < float(mean) < float(most) < 0.05 and count == "40"


def test_the_arithmetic_is_what_torch_counts():
    """Of the products of a layer's matrices, forward and backward; pairs of tokens as a triangle."""
    model = BENCH.make_model("tiny", 64, CPU)
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


def test_shapes_are_those_of_qwen3():
    """Parameters as published: 0.6B and 4B."""
    for name, expected in (("qwen3-0.6b", 596_049_920), ("qwen3-4b", 4_022_468_096)):
        model = BENCH.make_model(name, 65_536, torch.device("meta"))
        assert sum(each.numel() for each in model.parameters()) == expected
        assert model.config.max_position_embeddings == 65_536


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="^bench_trainer: --device cuda, but torch finds no GPU here$"):
        BENCH.main(["--device", "cuda"])
    with pytest.raises(SystemExit, match="^bench_trainer: --tokens 8: a row has at least 32$"):
        BENCH.main(["--tokens", "8"])
