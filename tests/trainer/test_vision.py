"""Models that see: packed rows and trees against transformers' own forward of each sequence alone, steps, files."""

import functools
import json
from dataclasses import replace

import forking
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from seeing import PROCESSORS, SEEING, Pictures, config_of, main, plain_logprobs, rows_of, step, write_model
from transformers import AutoConfig, AutoModelForImageTextToText

from prl.base.checkpoint_folders import part_path
from prl.base.errors import ConfigError
from prl.engines.vllm.weights import policy_tensors
from prl.losses import default_loss
from prl.rollouts.messages import StepBatch, sequence_slices
from prl.rollouts.packing import pack
from prl.rollouts.pictures import FOLDER, PictureError, PictureStore
from prl.trainer import worker
from prl.trainer.architecture import check_architecture
from prl.trainer.batch import empty_stack, stacks
from prl.trainer.lora import add_adapters
from prl.trainer.model import check_layout, freeze, load_model, save_weights, stack_logprobs
from prl.trainer.policy import PolicyTensors
from prl.trainer.trainer import Trainer
from prl.trainer.tree.attention import can_attend_over_trees
from prl.trainer.tree.tree import tree_stacks
from prl.transport.files import FileTransport

CPU = torch.device("cpu")
LAYOUTS = {"packed": stacks, "tree": tree_stacks, "paths": functools.partial(tree_stacks, share=False)}
TOWERS = {"qwen3_vl": "visual", "qwen2_5_vl": "visual", "llava": "vision_tower"}
LORA = {"rank": 2, "alpha": 4.0, "target_modules": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`folders(kind)`: a model folder of the kind."""
    torch.set_num_threads(1)
    top = tmp_path_factory.mktemp("seeing")
    return functools.cache(lambda kind: write_model(top / kind, kind))


@pytest.fixture(params=SEEING)
def kind(request):
    return request.param


@pytest.fixture
def model(folders, kind):
    return load_model(str(folders(kind)), device=CPU)


@pytest.fixture
def plain(folders, kind):
    """The same model as transformers has it, which draws no dropout."""
    return AutoModelForImageTextToText.from_pretrained(folders(kind), dtype=torch.float32).eval()


@pytest.fixture
def pictures(kind):
    return Pictures(config_of(kind))


def stacked(pictures, samples, layout, tokens=10**6, seq_len=64):
    """The stacks of samples, with their pictures' features."""
    rows = pack(samples, seq_len, 1)[0][0]
    return [replace(stack, features=pictures.features) for stack in LAYOUTS[layout](rows, tokens, CPU)]


def alone(model, stack, features):
    """The logprobs of a stack's wanted tokens, of each sequence by itself, `[flat tokens]`."""
    parts = []
    for part in sequence_slices(stack.sequence_lengths):
        own = [picture for picture in stack.pictures if part.start <= picture.start < part.stop]
        found = plain_logprobs(model, stack.token_ids[part].tolist(), own, features)
        parts += [found.new_zeros(1), found]
    return torch.cat(parts) * stack.wanted


@pytest.mark.parametrize("tokens", [10**6, 40], ids=["one stack", "several"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_have_the_logprobs_of_sequences_alone(model, plain, pictures, layout, tokens):
    assert can_attend_over_trees(model)
    some = stacked(pictures, pictures.samples(), layout, tokens)
    assert len(some) == 1 if tokens > 40 else len(some) > 1
    for stack in some:
        found = stack_logprobs(model, stack, head_chunk=None)[0]
        assert (found - alone(plain, stack, pictures.features)).abs().max() < 1e-5
    assert sum(len(stack.sequence_lengths) for stack in some) == 7


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_gradients_are_those_of_sequences_alone(model, plain, pictures, layout):
    """Of tower, projector and language part."""
    model.double(), plain.double()
    for stack in stacked(pictures, pictures.samples(), layout, 60):
        weights = torch.linspace(-1, 1, len(stack.token_ids), dtype=torch.float64)
        (stack_logprobs(model, stack, head_chunk=None)[0] * weights).sum().backward()
        (alone(plain, stack, pictures.features) * weights).sum().backward()
    expected = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    found = {name: weight.grad for name, weight in model.named_parameters()}
    assert any(name.startswith(f"model.{TOWERS[model.config.model_type]}") for name in expected)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-6 * gradient.abs().max() + 1e-9, name
    for name in found.keys() - expected.keys():  # of layers behind the one that is read
        assert found[name] is None or not found[name].any(), name


def test_a_sequence_that_is_cut_before_its_picture(model, plain, pictures):
    """The row ends before a picture that does not fit, and what is in it stays exact."""
    sample = pictures.sample([1, 2, 3], 0, [4, 5], 1, [6], 2, seed=3)
    sample.mask = [place in (1, 2) for place in range(len(sample.mask))]
    sample.advantages = list(map(float, sample.mask))
    inside = sample.pictures[1].start + 1
    (stack,) = stacked(pictures, [sample], "packed", seq_len=inside)
    assert len(stack.pictures) == 1 and stack.sequence_lengths == [sample.pictures[1].start]
    found = stack_logprobs(model, stack, head_chunk=None)[0]
    assert (found - alone(plain, stack, pictures.features)).abs().max() < 1e-5


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_a_picture_goes_through_the_tower_once(model, pictures, layout, monkeypatch):
    """However many sequences have it; what shares its tokens alone has it once in the row, too."""
    seen, own = [], model.base_model.get_image_features

    def note(**inputs):
        seen.append(len(inputs["pixel_values"]))
        return own(**inputs)

    monkeypatch.setattr(model.base_model, "get_image_features", note)
    (stack,) = stacked(pictures, pictures.samples(), layout)
    assert len(stack.pictures) == 9
    stack_logprobs(model, stack, head_chunk=None)
    assert seen == [sum(len(pictures.features[each.features]["pixel_values"]) for each in pictures.pictures[:5])]


def test_equal_ids_of_other_pictures_share_no_more_than_what_is_before(model, pictures):
    """One prompt of 3 tokens with a picture of its own each, and one with the first picture again."""
    samples = [pictures.sample([1, 2, 3], number, [4], seed=1) for number in (0, 1, 0)]
    ids = [len(sample.token_ids) for sample in samples]
    (stack,) = stacked(pictures, samples, "tree")
    assert stack.input_ids.numel() == (ids[0] - 1) + (ids[1] - 1) - 4


def test_rows_without_pictures_leave_the_tower_a_gradient_of_zero(model, plain, pictures):
    """As a rank has that trains with others: the tower runs on every one of them."""
    (stack,) = stacked(pictures, [pictures.sample([1, 2, 3], seed=2)], "packed")
    found = stack_logprobs(model, stack, head_chunk=None)[0]
    assert (found - alone(plain, stack, {})).abs().max() < 1e-5
    (found.sum() + stack_logprobs(model, empty_stack(CPU), head_chunk=None)[0].sum()).backward()
    body = dict(model.named_parameters())
    tower = {name: weight.grad for name, weight in body.items() if f".{TOWERS[model.config.model_type]}." in name}
    assert not any(gradient.any() for gradient in tower.values() if gradient is not None)
    assert sum(gradient is not None for gradient in tower.values()) > 20


def test_the_check_at_the_start_looks_at_pictures(model, monkeypatch):
    """A tower that mixes pictures is refused, as is one whose pictures count in no position."""
    for layout in LAYOUTS.values():
        check_layout(model, layout, tolerance=1e-4)
    own = model.base_model.get_image_features

    def mixed(**inputs):
        seen = own(**inputs)
        mean = torch.cat(tuple(seen.pooler_output)).mean(0)
        seen.pooler_output = [each + mean for each in seen.pooler_output]
        return seen

    monkeypatch.setattr(model.base_model, "get_image_features", mixed)
    with pytest.raises(ValueError, match="packed sequences see each other"):
        check_layout(model, stacks)


def test_what_is_refused_before_a_run(folders):
    for kind in SEEING:
        check_architecture(config_of(kind), "x")
    check_architecture(AutoConfig.for_model("llava", vision_config={"model_type": "siglip_vision_model"}), "x")
    others = [AutoConfig.for_model(kind) for kind in ("gemma3", "qwen2_vl", "idefics3", "qwen3_vl_moe")]
    others.append(AutoConfig.for_model("llava", vision_config={"model_type": "pixtral"}))
    for config in others:
        with pytest.raises(ValueError, match=f"^x: the trainer does not know how {config.model_type} with a .*$"):
            check_architecture(config, "x")
    strange = config_of("qwen3_vl")
    strange.text_config.layer_types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="layers of kind linear_attention"):
        check_architecture(strange, "x")


def test_a_processor_of_another_model_is_refused(model, pictures):
    """Its placeholders are another number than the vectors of the model."""
    sample = pictures.sample([1, 2, 3], 0, [4], seed=1)
    sample.pictures = [structs.replace(sample.pictures[0], length=sample.pictures[0].length + 1)]
    (stack,) = stacked(pictures, [sample], "packed")
    with pytest.raises(ValueError, match="its processor is that of another model"):
        stack_logprobs(model, stack, head_chunk=None)


# --- steps ------------------------------------------------------------------------------------------------------------


def assert_same_weights(one, other, bound):
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert (weight - other[name]).abs().max() < bound, name


def weights_in(folder):
    return load_file(folder / "model.safetensors")


def test_a_step_over_trees_is_one_over_packed_rows(folders, kind, pictures, tmp_path):
    """With a reference in the trainer, behind a prefix, whose distributions are compared with the policy's."""
    found = {}
    for share in (True, False):
        rows = rows_of(pictures, 1)[0]
        trainer, metrics = step(folders(kind), rows, pictures.features, options={"share_prefixes": share})
        save_weights(trainer.model, tmp_path / str(share), torch.float32)
        found[share] = metrics
    shared, packed = found[True].pop("tokens/forward"), found[False].pop("tokens/forward")
    assert shared < packed and found[True]["tokens/ref_kl"] > 0
    assert found[True] == pytest.approx(found[False], rel=1e-4, abs=1e-5)
    assert_same_weights(weights_in(tmp_path / "True"), weights_in(tmp_path / "False"), 2e-5)


@pytest.mark.slow
def test_two_ranks_train_like_one_process(folders, tmp_path, monkeypatch):
    """One of them has no row with a picture."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for kind in SEEING:
        (tmp_path / kind).symlink_to(folders(kind))
    assert forking.exit_codes(main, [(tmp_path, list(SEEING), rank) for rank in range(2)], 300) == [0, 0]
    for kind in SEEING:
        pictures = Pictures(config_of(kind))
        trainer, _ = step(folders(kind), [row for rows in rows_of(pictures, 2) for row in rows], pictures.features)
        save_weights(trainer.model, tmp_path / "one", torch.float32)
        base = weights_in(folders(kind))
        assert any(not torch.equal(base[name], weight) for name, weight in weights_in(tmp_path / "one").items())
        assert_same_weights(weights_in(tmp_path / "one"), weights_in(tmp_path / f"{kind} of two"), 2e-5)


@pytest.fixture
def config(folders, kind):
    """The config of a trainer's process."""
    optim = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3}
    return {
        "seed": 0,
        "max_steps": 2,
        "references": ["initial", "ema:0.5"],
        "model": {"path": str(folders(kind)), "trust_remote_code": False, "dtype": "float32"},
        "losses": {"": {"_target_": "prl.losses.default_loss", "_partial_": True}},
        "weights": {"_target_": "prl.weights.files.FileWeights"},
        "trainer": {
            "_target_": "prl.trainer.trainer.Trainer",
            "device": "cpu",
            "optim": optim,
            "batch_timeout_s": 5.0,
            "token_export": True,
        },
    }


def a_run(config, run_dir, steps, kind):
    """Let the process train `steps` on the same samples, and return its checkpoint."""
    pictures = Pictures(config_of(kind), PictureStore(run_dir / FOLDER))
    transport = FileTransport(run_dir)
    for number in steps:
        transport.send_batch(StepBatch(number, pack(pictures.samples(), 64, 1)[0][0], 0), 0)
    transport.send_end(steps[-1])
    worker.run(config, run_dir)
    return part_path(run_dir, steps[-1])


def test_a_checkpoint_is_one_of_transformers_and_a_run_goes_on_from_it(config, kind, folders, tmp_path):
    """Under the names that transformers writes, with the files of the processor; frozen parts stay, and are there."""
    config["model"]["freeze"] = [TOWERS[kind]]
    both = a_run(config, tmp_path / "both", [1, 2], kind)
    first = a_run(config, tmp_path / "first", [1], kind)
    config["resume"] = {"folder": str(first), "step": 1}
    again = a_run(config, tmp_path / "again", [2], kind)
    for name, weight in weights_in(both).items():
        assert torch.equal(weight, weights_in(again)[name]), name

    base, found = weights_in(folders(kind)), weights_in(again)
    assert found.keys() == base.keys()
    changed = {name for name, weight in found.items() if not torch.equal(weight, base[name])}
    assert changed and not any(TOWERS[kind] in name for name in changed)
    for name in (*PROCESSORS[kind], "chat_template.jinja", "tokenizer.json"):
        assert (again / name).read_bytes() == (folders(kind) / name).read_bytes()
    policy, pictures = load_model(str(again), device=CPU), Pictures(config_of(kind))
    plain = AutoModelForImageTextToText.from_pretrained(again).eval()
    (stack,) = stacked(pictures, pictures.samples(), "tree")
    logprobs = stack_logprobs(policy, stack, head_chunk=None)[0]
    assert (logprobs - alone(plain, stack, pictures.features)).abs().max() < 1e-5


def test_the_export_names_the_pictures_of_a_sequence(config, kind, tmp_path):
    a_run(config, tmp_path, [1], kind)
    lines = [json.loads(line) for line in (tmp_path / "tokens/step_000001/rank_0.jsonl").read_text().splitlines()]
    expected = {tuple(sample.token_ids): sample.pictures for sample in Pictures(config_of(kind)).samples()}
    named = 0
    for line in lines:
        pictures = [[each.start, each.length, each.digest] for each in expected[tuple(line["token_ids"])] or ()]
        named += "pictures" in line
        assert line.get("pictures", []) == pictures or len(lines) > len(expected)
    assert named == 6


def test_a_step_reads_each_picture_once(config, kind, tmp_path):
    """One that is not there ends the trainer in a line."""
    pictures = Pictures(config_of(kind), PictureStore(tmp_path / FOLDER))
    trainer = worker.make_trainer(config, CPU, run_dir=tmp_path)
    batch = StepBatch(1, pack(pictures.samples(), 64, 1)[0][0], 0)
    assert trainer.train_step(batch)["grad_norm"] > 0
    store = trainer.features.__self__
    trainer.train_step(batch)
    assert store.reads == 5
    lost = pictures.pictures[4]
    store.features_file(lost.digest, lost.features).unlink()
    again = worker.make_trainer(config, CPU, run_dir=tmp_path)
    with pytest.raises(PictureError, match=f"no features of the picture {lost.digest[:12]}") as caught:
        again.train_step(batch)
    assert worker.reason(caught.value)


def test_a_model_of_text_refuses_pictures(tiny):
    pictures = Pictures(config_of("llava"))
    trainer = Trainer(model=tiny, rl_losses={"": default_loss}, max_steps=1)
    with pytest.raises(ValueError, match="a sample has pictures, which Qwen3ForCausalLM does not see"):
        trainer.train_step(StepBatch(1, pack(pictures.samples(), 64, 1)[0][0], 0))


# --- parts of a model -------------------------------------------------------------------------------------------------


def test_frozen_parts_are_those_with_the_name(model, tiny):
    tower = TOWERS[model.config.model_type]
    freeze(model, [tower, "norm"])
    for name, weight in model.named_parameters():
        assert weight.requires_grad == (tower not in name.split(".") and "norm" not in name.split("."))
    with pytest.raises(ConfigError, match=f"no parameter has 'visua' in its name; this model has {tower}, "):
        freeze(model, ["visua"])
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        freeze(tiny, ["embed_tokens", "layers", "norm"])


def test_adapters_are_of_the_language_part_unless_the_tower_is_named(folders, kind, pictures, tmp_path):
    """Either way an engine gets the policy's weights by adding adapters to those of the files."""
    own = {"qwen3_vl": "linear_fc1", "qwen2_5_vl": "qkv", "llava": "fc1"}[kind]
    for targets in (None, ["v_proj", own]):
        model = load_model(str(folders(kind)), device=CPU)
        add_adapters(model, LORA | {"target_modules": targets}, str(folders(kind)))
        names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        towers = [name for name in names if ".language_model." not in name]
        assert names and bool(towers) == (targets is not None) and len(towers) < len(names)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.2)
        folder = tmp_path / str(targets)
        PolicyTensors(model, torch.float32, adapters_alone=True).write(folder / "sent")
        # Files of the two others have layers under names of their own.
        assert (folder / "sent" / "adapter_model.safetensors").exists() == (kind == "qwen3_vl")
        merged = dict(policy_tensors(str(folder / "sent"), folders(kind)))
        save_weights(model, folder / "whole", torch.float32)
        assert_same_weights(merged, weights_in(folder / "whole"), 1e-6)
        (stack,) = stacked(pictures, pictures.samples(), "tree")
        (folder / "whole" / "config.json").write_bytes((folders(kind) / "config.json").read_bytes())
        plain = AutoModelForImageTextToText.from_pretrained(folder / "whole").eval()
        found = stack_logprobs(model, stack, head_chunk=None)[0]
        assert (found - alone(plain, stack, pictures.features)).abs().max() < 1e-5
