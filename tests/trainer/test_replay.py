"""A run of the real trainer on batches that are kept, trained again: bit by bit the same, or where it differs."""

import copy
import functools
import json
import re
import shutil

import msgspec
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from prl.compose import compose
from prl.config.instantiate import plain
from prl.errors import PrlError
from prl.launch.local import resolve_model
from prl.launch.specs import trainer_payload
from prl.orchestrator.packing import pack
from prl.provenance import model_hash
from prl.replay.__main__ import main, replay
from prl.replay.recorded import Recorded
from prl.trainer import worker
from prl.trainer.config import GSPOLossConfig
from prl.wire import checkpoints
from prl.wire.files import FileTransport
from prl.wire.messages import Origin, StepBatch

STEPS = 3
BASE = (
    "orchestrator.keep_batches=true",
    f"max_steps={STEPS}",
    "trainer.optim.lr=1e-2",
    "checkpoint.every=2",
    "trainer.tokens_per_forward=128",
    "trainer.example_steps=3",
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """The command sets these for the libraries that it loads next."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def base():
    return compose(["run.name=first", *BASE])


@pytest.fixture(scope="module")
def train(make_sample, base, tmp_path_factory):
    """`train(config)`: the directory of a run, as the trainer's process and the orchestrator leave it."""

    def samples(step, reference):
        """Two groups of three, of one env each; every second one asks for the initial model where `reference`."""
        for number in range(6):
            group, length = number // 3, 12 + (5 * number + step) % 9
            pulled = {"initial_reference": True, "ref_kl_weights": [0.2 * (place >= 4) for place in range(length)]}
            yield make_sample(
                length,
                4,
                seed=7 * step + group,
                env_name=f"env{group}",
                origin=Origin(task=f"t{group}", group=10 * step + group, rollout=number % 3, agent="a"),
                **(pulled if reference and number % 2 else {}),
            )

    def run(config=base, typed=BASE, *, reference=False):
        folder = tmp_path_factory.mktemp("outputs") / "first"
        (folder / ".hydra").mkdir(parents=True)
        OmegaConf.save(OmegaConf.create(plain(config)), folder / "config.yaml")
        OmegaConf.save(OmegaConf.create([*typed, "run.name=first"]), folder / ".hydra" / "overrides.yaml")
        OmegaConf.save({"overrides": {"hydra": ["hydra.mode=RUN"]}}, folder / ".hydra" / "hydra.yaml")
        (folder / "provenance.json").write_text(json.dumps({"cwd": str(folder.parent)}))
        transport = FileTransport(folder)
        for step in range(1, STEPS + 1):
            rows = pack(list(samples(step, reference)), 48, 1)[0][0]
            transport.send_batch(StepBatch(step, rows, 0, checkpoint=step == 2), 0)
        worker.run(trainer_payload(config, resolve_model(config.model, "cpu"), initial_reference=reference), folder)
        for step in checkpoints.parts_of(folder):
            checkpoints.finish(folder, step)
        with (folder / "metrics.jsonl").open("wb") as file:
            for step in range(1, STEPS + 1):
                line = {"step": step, "reward/all/mean": 0.5} | transport.receive_metrics(step)
                file.write(msgspec.json.encode(line) + b"\n")
                transport.discard_weights(step - 1)
        return folder

    return run


@pytest.fixture(scope="module")
def trained(train):
    """A run with the defaults; to be left as it is."""
    return train()


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "first")


@pytest.fixture
def changed(base):
    """`changed(key=value)`: the config of the run with another value; dots are written `__`."""

    def make(**values):
        config = copy.deepcopy(base)
        for key, value in values.items():
            *path, name = key.split("__")
            setattr(functools.reduce(getattr, path, config), name, value)
        return config

    return make


@pytest.fixture
def replayed(base, capsys):
    """`replayed(folder, changed)`: whether nothing differs, and what is said."""

    def run(folder, other=None, config=base):
        same = replay(Recorded(folder, config), other)
        return same, capsys.readouterr().out

    return run


def weights(folder, step):
    return folder / "checkpoints" / f"step_{step:06d}" / "model.safetensors"


def test_the_command_arrives_at_the_same_weights_bit_by_bit_and_writes_nothing(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained.parent)
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    torch.set_num_threads(2)
    assert main(["first"]) == 0
    assert torch.get_num_threads() == 1, "as in the trainer's process: the order of sums follows it"
    said = capsys.readouterr().out
    assert f"bitwise the same weights at step {STEPS} (checkpoints/step_000003)" in said
    assert (
        "3 steps trained again; compared bit by bit: tokens of 3 steps, metrics of 3 steps, weights of 2 steps" in said
    )
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


NOISY = """
import torch
from prl.trainer.trainer import Trainer

class Noisy(Trainer):
    def train_step(self, batch):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 1e-3 * torch.randn(parameter.shape)
        return super().train_step(batch)
"""


@pytest.mark.parametrize("kind", ["gspo with a reference and entropy", "another optimiser", "random numbers"])
def test_other_trainers_arrive_at_theirs(train, changed, replayed, tmp_path, monkeypatch, kind):
    config = changed()
    if kind == "gspo with a reference and entropy":
        config.loss = GSPOLossConfig(clip_ratio_low=0.1, clip_ratio_high=0.1, entropy_coef=0.01)
    elif kind == "another optimiser":
        config.trainer.optim._target_, config.trainer.optim.momentum = "torch.optim.SGD", 0.9
    else:
        (tmp_path / "noisy_trainer.py").write_text(NOISY)
        monkeypatch.syspath_prepend(tmp_path)
        config.trainer._target_ = "noisy_trainer.Noisy"
    folder = train(config, reference="reference" in kind)
    same, said = replayed(folder, config=config)
    assert same and f"bitwise the same weights at step {STEPS} (checkpoints/step_000003)" in said
    if kind == "random numbers":  # each of two trainers has its own
        other = copy.deepcopy(config)
        other.trainer.batch_timeout_s = 7.0
        same, said = replayed(folder, other, config)
        assert same and "nothing differs in 3 steps: tokens, metrics and weights are the same bit by bit" in said


def test_a_run_with_adapters_arrives_at_its_weights(train, changed, replayed):
    config = changed(model__lora__rank=4)
    folder = train(config, (*BASE, "model.lora.rank=4"))
    same, said = replayed(folder, config=config)
    assert same and "bitwise the same weights at step 3 (checkpoints/step_000003)" in said
    same, said = replayed(folder, changed(model__lora__rank=4, model__lora__alpha=16.0), config)
    assert not same and "step 1: the first update that differs" in said


def test_one_bit_of_the_weights_is_seen(run, replayed):
    tensors = load_file(weights(run, 2))
    name = sorted(tensors)[3]
    tensors[name].view(torch.int32).flatten()[5] ^= 1
    save_file(tensors, weights(run, 2), metadata={"format": "pt"})
    same, said = replayed(run)
    assert not same and "step 2: the first difference from the run" in said
    assert f"checkpoints/step_000002: 1 of {len(tensors)} tensors differ, {name} first" in said
    assert "at step 3 (checkpoints/step_000003)" in said


@pytest.mark.parametrize("exported", [True, False])
def test_one_bit_of_an_advantage_is_found(run, replayed, exported, tokenizer):
    """With the export of its step at its token."""
    path = FileTransport(run).batch_path(1, 0)
    batch = msgspec.msgpack.decode(path.read_bytes(), type=StepBatch)
    row = batch.micro_batches[0]
    place = next(place for place, value in enumerate(row.advantages) if value)
    before = row.advantages[place]
    row.advantages[place] *= 1 + 2**-20
    path.write_bytes(msgspec.msgpack.encode(batch))
    if not exported:
        shutil.rmtree(run / "tokens")
    same, said = replayed(run)
    assert not same and said.startswith("step 1: the first difference from the run\n")
    named = (
        f"token {place} ({tokenizer.decode([row.input_ids[place]])!r}):\n  advantages: in the run {before:.9g}, now "
    )
    assert (named in said) == exported
    assert "loss/mean: in the run" in said and "metrics.jsonl" not in said
    assert "other weights than the run at step 3 (checkpoints/step_000003)" in said


def test_a_changed_learning_rate_differs_in_the_first_update_and_then_in_tokens(run, replayed, changed, base):
    same, said = replayed(run, changed(trainer__optim__lr=2e-2))
    assert not same
    assert said.index("step 1: the first update that differs") < said.index("step 2: the first token that differs")
    assert "lr: recorded 0.007, changed 0.014" in said
    found = re.search(
        r"env (\w+), task (\w+), group (\d+), rollout (\d), agent a, token (\d+) \('(.)'\):\n"
        r"  logprob: recorded (\S+), changed (\S+)\n",
        said,
    )
    *origin, token, text, before, after = found.groups()
    exported = map(json.loads, (run / "tokens" / "step_000002" / "rank_0.jsonl").read_text().splitlines())
    names = ("env", "task", "group", "rollout")
    (line,) = [line for line in exported if [str(line[name]) for name in names] == origin]
    assert line["text"][int(token)] == text and f"{line['trainer_logprobs'][int(token)]:.9g}" == before != after
    apart = float(re.search(r"weights after step 3: .* by at most ([\d.e+-]+)", said)[1])
    assert 1e-3 < apart < 1


def test_a_changed_loss_differs_in_what_it_asks_of_tokens(run, replayed, changed):
    """kl_tau: logprobs and fates of the first step are the same; the gradient by the logprob is not."""
    same, said = replayed(run, changed(loss__kl_tau=0.5))
    first, update = said[said.index("step 1: the first token that differs") :].split("step 1: the first update")
    assert not same and "d loss / d logprob: recorded " in first
    assert "  logprob:" not in first and "fate:" not in first
    before, after = re.search(r"grad_norm: recorded (\S+), changed (\S+?)[;\n]", update).groups()
    assert float(before) != float(after)


def test_entropy_and_the_mask_show_in_tokens_too(run, replayed, changed):
    assert "d loss / d entropy: recorded 0, changed -" in replayed(run, changed(loss__entropy_coef=0.1))[1]
    said = replayed(run, changed(loss__dppo_mask_low=0.0, loss__dppo_mask_high=0.0))[1]
    assert "fate: recorded rl kept, changed rl dropped" in said


def test_a_change_that_the_trainer_does_not_read_is_said_to_make_no_difference(run, replayed, changed):
    same, said = replayed(run, changed(orchestrator__max_async_level=0, orchestrator__batch_size=64))
    assert same and said.startswith("the trainer does not read orchestrator.batch_size, orchestrator.max_async_level: ")
    assert "steps" not in said, "nothing is trained"
    same, said = replayed(run, changed())
    assert same and said == "nothing is changed: the run had these values\n"


def test_batches_up_to_a_step_are_replayed_so_far(run, replayed):
    shutil.rmtree(run / "batches" / "step_000003")
    same, said = replayed(run)
    assert same and "batches are kept up to step 2, metrics up to step 3: what follows is not replayed" in said
    assert "bitwise the same weights at step 2 (checkpoints/step_000002)" in said


def test_a_step_that_cannot_be_trained_ends_it_with_the_reason(run, replayed):
    path = FileTransport(run).batch_path(3, 0)
    batch = msgspec.msgpack.decode(path.read_bytes(), type=StepBatch)
    batch.micro_batches[0].advantages = [1e38 for _ in batch.micro_batches[0].advantages]
    path.write_bytes(msgspec.msgpack.encode(batch))
    same, said = replayed(run)
    assert not same
    assert "step 3: the run's trainer cannot take it: the gradient's norm is" in said and "the run took it" in said
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:2]) + '\n{"step": 3, "loss')
    same, said = replayed(run)
    assert same and "the run has no metrics of that step either" in said
    assert "bitwise the same weights at step 2 (checkpoints/step_000002)" in said


def test_a_shorter_run_is_compared_up_to_its_end(run, replayed, changed):
    said = replayed(run, changed(max_steps=2))[1]
    assert said.startswith("the changed run would end after step 2: what follows is not compared\n")
    assert "weights after step 2: " in said
    assert "lr: recorded 0.007, changed 0.0055" in said  # it decays over two steps, not three


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoints/step_000002/model.safetensors", "does not hold weights"),
        ("tokens/step_000001/rank_0.jsonl", "line 6 cannot be read"),
        ("metrics.jsonl", None),
    ],
)
def test_other_files_that_are_cut(run, base, name, says):
    """The last line of a metrics file may be: the run was writing it."""
    data = (run / name).read_bytes()
    (run / name).write_bytes(data[:-20])
    if says is None:
        assert replay(Recorded(run, base))
        return
    with pytest.raises(PrlError) as error:
        replay(Recorded(run, base))
    assert str(error.value).startswith(f"{run / name}") and says in str(error.value)


def test_an_export_that_is_empty_is_not_taken_for_none(run, base):
    path = run / "tokens" / "step_000001" / "rank_0.jsonl"
    path.write_text("")
    with pytest.raises(PrlError, match=r"rank_0.jsonl has 0 sequences, but the batch has \d+"):
        replay(Recorded(run, base))
    path.unlink()
    assert replay(Recorded(run, base))


def damaged(run, how):
    path = FileTransport(run).batch_path(2, 0)
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "missing":
        path.unlink()
    elif how == "of another step":
        shutil.copy(FileTransport(run).batch_path(1, 0), path)
    else:
        batch = msgspec.msgpack.decode(data, type=StepBatch)
        row = batch.micro_batches[0]
        row.mask = row.mask[:-1] if how == "misaligned" else row.mask
        row.env_names = row.env_names[1:] if how == "without an env" else row.env_names
        path.write_bytes(msgspec.msgpack.encode(batch))
    return str(path)


@pytest.mark.parametrize("how", ["cut", "missing", "of another step", "misaligned", "without an env"])
def test_a_batch_that_is_damaged_or_missing_is_named_before_anything_is_trained(run, base, how, capsys):
    path = damaged(run, how)
    with pytest.raises(PrlError) as error:
        replay(Recorded(run, base))
    assert path in str(error.value) and "\n" not in str(error.value) and capsys.readouterr().out == ""


def test_other_refusals(run, changed, base):
    refused = {
        "train with orchestrator.keep_batches=true": (changed(orchestrator__keep_batches=False), None),
        "trainer.num_processes: a replay is one process": (base, changed(trainer__num_processes=2)),
        "trainer.threads: a replay has as many": (base, changed(trainer__threads=1)),
    }
    for says, (config, other) in refused.items():
        with pytest.raises(PrlError, match=says):
            replay(Recorded(run, config), other)
    provenance = {"models": {"model": model_hash(base.model.path) | {"sha256": "0"}}}
    (run / "provenance.json").write_text(json.dumps(provenance))
    with pytest.raises(PrlError, match=r"model\.path='.*tiny' has other weights than when the run began"):
        replay(Recorded(run, base))


def test_why_it_may_differ_is_said_first(run, replayed):
    (run / "provenance.json").write_text(json.dumps({"gpus": ["one"], "packages": {"torch": "1.0"}}))
    unread = {"inference.port": [1, 2], "losses": [1, 2], "envs.math.batch_size": [1, 2]}  # by the trainer
    also = {"envs.math.loss.kl_tau": [0.0, 0.1]}
    resumes = [
        {"step": at, "changed": keys} for at, keys in enumerate([{}, unread, {"max_steps": [9, 3]} | unread | also])
    ]
    (run / "resumes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in resumes))
    said = replayed(run)[1].splitlines()
    assert "the run trained on a GPU, and bitwise the same is promised for one CPU process" in said[0]
    assert said[1].endswith("the run went on after step 2 with other values of max_steps, envs.math.loss.kl_tau")
    assert "the run had torch 1.0, this is " in said[2]
    (run / "resumes.jsonl").write_text('{"step": 1, "chan\n{"step": 2}\n')  # cut off, and gone on with
    assert "resumes.jsonl, line 1 cannot be read" in replayed(run)[1].splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["first", "trainer.optm.lr=1"], "trainer.optim"),
        (["first", "loss=gsop"], "gspo"),
        (["nope"], "nope: there is no run here or under outputs/"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(trained, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(trained.parent)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and says in said and said.count("\n") == 1


def test_a_run_that_names_foreign_code_needs_trust(train, changed, tmp_path, monkeypatch, capsys):
    config = changed(trainer__optim___target_="webbrowser.open")
    (tmp_path / "first").mkdir()
    OmegaConf.save(OmegaConf.create(plain(config)), tmp_path / "first" / "config.yaml")
    monkeypatch.chdir(tmp_path)
    assert main(["first"]) == 2
    said = capsys.readouterr().err
    assert "trainer.optim._target_=webbrowser.open" in said and "add --trust" in said
