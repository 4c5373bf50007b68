"""Two ranks against one, on the same samples."""

import copy

import forking
import msgspec
import pytest
import sharded
import torch
from safetensors.torch import load_file

from prl.orchestrator.packing import pack
from prl.trainer.export import TokenExport
from prl.wire import files
from prl.wire.messages import StepBatch


@pytest.fixture
def steps(make_sample):
    """Samples of three steps. Step 1 has more rl than one rank holds, and one opd sample; step 2 has a single row; in
    step 3 the trainer provides the reference."""
    opd = make_sample(
        17,
        5,
        seed=9,
        advantages=None,
        rl_weights=[0.0] * 17,
        ref_kl_weights=[0.0] * 5 + [1.0] * 12,
        ref_logprobs=[-1.0] * 17,
    )
    # Two losses that normalise differently: one by the tokens of all ranks, one by their sequences.
    first = [make_sample(24 - i, 3 + i, seed=i, loss="gspo" if i % 2 else "") for i in range(6)] + [opd]
    first[2].logprobs[10] = float("nan")
    weights = [0.0] * 4 + [0.5] * 16
    third = [make_sample(20, 4, seed=i, ref_kl_weights=weights, initial_reference=True) for i in range(3)]
    return first, [make_sample(20, 4, seed=11)], third


def exported(folder, step, ranks):
    """Of each sequence: its tokens, the rank that had it, and its fates."""
    paths = [folder / "tokens" / files.step_name(step) / f"rank_{rank}.jsonl" for rank in range(ranks)]
    lines = [msgspec.json.decode(line) for path in paths for line in path.read_bytes().splitlines()]
    assert all(line["step"] == step for line in lines)
    return sorted((line["token_ids"], line["rank"], line["fate"]) for line in lines)


@pytest.mark.slow
def test_two_ranks_train_like_one(tiny, tiny_path, steps, tmp_path, monkeypatch):
    alone = []
    for step, samples in enumerate(steps, 1):
        alone.append(StepBatch(step, pack(samples, 24, 1)[0][0], 1))
        shared, _ = pack(samples, 24, 2)
        assert len(shared[0]) == len(shared[1])
        for rank, rows in enumerate(shared):
            files.FileTransport(tmp_path).send_batch(StepBatch(step, rows, 1), rank)
        if step == 1:
            having = [any(row.ref_kl_weights for row in rows) for rows in shared]
            assert sorted(having) == [False, True], "the opd sample should be on one rank only"
        elif step == 2:
            assert sorted(sum(map(sum, (r.sequence_lengths for r in rows))) for rows in shared) == [0, 20]

    context = forking.ranks()
    ranks = [context.Process(target=sharded.pair, args=(tmp_path, tiny_path, rank)) for rank in (0, 1)]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for rank in ranks:
        rank.start()
    reference = copy.deepcopy(tiny)
    trainer = sharded.pair_trainer(tiny, lambda: reference, TokenExport(tmp_path / "alone", 0))
    expected = [trainer.train_step(batch) for batch in alone]
    try:
        for rank in ranks:
            rank.join(180)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]

    found = [msgspec.json.decode((tmp_path / f"metrics_{rank}.json").read_bytes()) for rank in (0, 1)]
    assert found[0] == found[1], "every rank must report the same numbers"
    assert "ref_kl" in found[0][0] and "ref_kl" not in found[0][1]
    assert found[0][0]["tokens/invalid_logprobs"] == 1.0 and found[0][0]["samples/truncated"] == 1.0
    assert [line["samples/rl"] for line in found[0]] == [6.0, 1.0, 3.0]
    assert (found[0][0]["tokens/rl"], found[0][0]["tokens/ref_kl"], found[0][1]["tokens/ref_kl"]) == (95.0, 12.0, 0.0)
    assert found[0][2]["tokens/ref_kl"] == 3 * 16.0 and abs(found[0][2]["ref_kl"]) > 1e-4
    for step, samples in enumerate(steps, 1):
        together, single = exported(tmp_path, step, 2), exported(tmp_path / "alone", step, 1)
        assert len(single) == len(samples) and {rank for _, rank, _ in together} == set(range(min(2, len(samples))))
        assert [(ids, fate) for ids, _, fate in together] == [(ids, fate) for ids, _, fate in single]
    for mine, theirs in zip(found[0], expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)

    weights = [load_file(tmp_path / f"rank_{rank}.safetensors") for rank in (0, 1)]
    for name, parameter in tiny.named_parameters():
        assert torch.equal(weights[0][name], weights[1][name]), name
        assert (weights[0][name] - parameter).abs().max() < 2e-6, name  # a step moves weights by up to 1e-4
