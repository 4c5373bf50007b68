"""Memory of the trainer: chunks of the head, and freed blocks that go back to the system."""

import subprocess
import sys

import pytest

from prl.trainer.logprobs import usual_chunk

HELD = """
import sys

import torch

from prl.trainer.memory import give_back_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "given back":
    give_back_large_blocks()
torch.ones(8 << 18).sum()  # a free of such a block raises glibc's own threshold, as a step does
before = resident()
activations, kept = [], []
for _ in range(40):  # 8 MiB each, with what lives longer between them
    activations.append(torch.ones(8 << 18))
    kept.append(torch.ones(1 << 15))
del activations
print(resident() - before)
"""


@pytest.mark.parametrize(
    ("vocab", "dim", "chunk"), [(304, 128, 1024), (49_152, 576, 288), (151_936, 1024, 512), (151_936, 4096, 1024)]
)
def test_a_chunk_follows_the_heads_size(vocab, dim, chunk):
    assert usual_chunk(vocab, dim) == chunk


def test_freed_activations_go_back_to_the_system():
    held = {}
    for how in ("by itself", "given back"):
        done = subprocess.run([sys.executable, "-c", HELD, how], capture_output=True, text=True, check=True)
        held[how] = float(done.stdout)
    assert held["given back"] < 40 < held["by itself"]
