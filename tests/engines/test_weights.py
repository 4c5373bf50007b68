"""Weights that a server is asked to load: those of another model are refused before it touches its own."""

import pytest
import torch
from safetensors.torch import save_file

from prl.engines.vllm.weights import WeightsError, policy_tensors, refuse_other_model, refuse_other_policy, shapes_at

STARTED = {"a.weight": (2, 3), "b.weight": (4,)}


def written(folder, shapes):
    folder.mkdir(exist_ok=True)
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    "shapes",
    [
        STARTED,
        {**STARTED, "lm_head.weight": (9,)},
        {"a.weight": (2, 3), "renamed": (4,)},
        {"all": (1,), "renamed": (1,)},
    ],
)
def test_weights_of_the_model_pass(tmp_path, shapes):
    """Also under other names, where names differ both ways: transformers may write them so."""
    written(tmp_path / "started", STARTED)
    refuse_other_model([written(tmp_path, shapes)], shapes_at(str(tmp_path / "started")), tied=True)
    refuse_other_model([written(tmp_path, shapes)], {}, tied=False)


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({**STARTED, "b.weight": (5,)}, "b.weight .* is not as"),
        ({"a.weight": (2, 3)}, "b.weight .* is not as"),
        ({**STARTED, "c.weight": (1,)}, "c.weight .* is not as"),
        ({**STARTED, "lm_head.weight": (9,)}, "lm_head.weight .* is not as"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, shapes, named):
    written(tmp_path / "started", STARTED)
    with pytest.raises(WeightsError, match=named):
        refuse_other_model([written(tmp_path, shapes)], shapes_at(str(tmp_path / "started")), tied=False)


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = written(tmp_path, STARTED)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="cannot be read"):
        refuse_other_model([path], {}, tied=False)


def adapter(folder, layers):
    """A folder of peft's: alpha 6, rank 2, all numbers of A 1 and of B 2."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 6.0}')
    matrices = {}
    for layer, (rows, columns) in layers.items():
        matrices[f"base_model.model.{layer}.lora_A.weight"] = torch.ones(2, columns)
        matrices[f"base_model.model.{layer}.lora_B.weight"] = torch.full((rows, 2), 2.0)
    save_file(matrices, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_added_to_the_weights_of_its_layer(tmp_path):
    """1 + 6 / 2 * (2 * 1 + 2 * 1) = 13."""
    base = written(tmp_path / "base", {"a.weight": (2, 3), "b.weight": (4,)}).parent
    loaded = dict(policy_tensors(str(adapter(tmp_path / "adapter", {"a": (2, 3)})), base))
    assert torch.equal(loaded["a.weight"], torch.full((2, 3), 13.0)) and torch.equal(loaded["b.weight"], torch.ones(4))


@pytest.mark.parametrize("layers", [{"c": (2, 3)}, {"a": (3, 2)}])
def test_an_adapter_of_another_model_is_refused(tmp_path, layers):
    started = shapes_at(str(written(tmp_path / "started", STARTED).parent))
    folder = adapter(tmp_path / "adapter", layers)
    with pytest.raises(WeightsError, match="an adapter is for [ac] "):
        refuse_other_policy(folder, started, tied=True)
    refuse_other_policy(folder, {}, tied=True)
    refuse_other_policy(adapter(tmp_path / "own", {"a": (2, 3)}), started, tied=True)
