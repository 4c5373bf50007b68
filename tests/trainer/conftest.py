"""The tiny policy, and samples of it."""

import copy
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import flex_attention

from prl.rollouts.messages import TrainingSample
from prl.trainer import ranks
from prl.trainer.model import load_model
from prl.trainer.tree import flex
from prl.trainer.tree.flex import FlexTree

TINY = str(Path(__file__).parents[2] / "prl" / "models" / "tiny")


@pytest.fixture(scope="session")
def tiny_path():
    return TINY


@pytest.fixture(scope="session")
def _loaded():
    torch.set_num_threads(1)
    return load_model(TINY, device=torch.device("cpu"))


@pytest.fixture
def tiny(_loaded):
    """A policy of the test's own, with real weights."""
    return copy.deepcopy(_loaded)


@pytest.fixture
def a_rank():
    """This process as the only rank."""
    ranks.meet(0, 1, torch.device("cpu"), {})
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
@torch.no_grad()
def sampled(_loaded):
    """Sixteen sequences `[16, 24]` that the model itself sampled, rather hot, and their logprobs at temperature 1.

    Random tokens would have logprobs of -90, where float32 keeps no digits and every ratio is 0; at temperature 1
    most are exactly 0.0.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(16)[:, None] % 10 + 48
    logprobs = torch.zeros(16, 1)
    for _ in range(23):
        logp = _loaded(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
        token = torch.multinomial((logp / 3).softmax(-1), 1, generator=generator)
        ids, logprobs = torch.cat([ids, token], 1), torch.cat([logprobs, logp.gather(1, token)], 1)
    return ids, logprobs


@pytest.fixture(scope="session")
def make_sample(sampled):
    """`make(length, prompt, seed, **fields)`: the model's own tokens, sampler logprobs near its own, advantages."""

    def make(length, prompt, seed=0, **fields):
        rng = random.Random(seed)
        mask = [i >= prompt for i in range(length)]
        defaults = {
            "token_ids": sampled[0][seed % 16, :length].tolist(),
            "mask": mask,
            "logprobs": [
                min(own + rng.gauss(0, 0.3), -1e-3) if m else 0.0
                for own, m in zip(sampled[1][seed % 16].tolist(), mask, strict=False)
            ],
            "temperatures": [rng.choice([0.7, 1.0, 1.3]) for _ in range(length)],
            "env_name": "test",
            "reward": 0.5,
            "advantages": [rng.choice([-0.8, 0.3, 1.1]) if m else 0.0 for m in mask],
        }
        return TrainingSample(**(defaults | fields))

    return make


@pytest.fixture(scope="session")
def _flex():
    """FlexAttention without its kernels, compiled once for all tests, and which of its graphs have run."""
    ran = []

    def backend(graph, inputs):
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def run(*given):
            ran.append(graph)
            return compiled(*given)

        return run

    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend), ran  # as `compiled` does


@pytest.fixture
def graphs(_flex, monkeypatch):
    """Rows attend as on a GPU, but for the kernels. Gives the compiled graphs that have run, one for each time."""
    made, ran = _flex
    ran.clear()
    monkeypatch.setattr(flex, "compiled", lambda: made)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # it wants no gradients
    monkeypatch.setattr("prl.trainer.tree.tree.row_tree", FlexTree.of_row)
    with torch._dynamo.config.patch(recompile_limit=64):  # the tests have more kinds of heads than a run
        yield ran
