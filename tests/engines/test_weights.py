"""Weights that a server is asked to load: those of another model are refused before it touches its own."""

import pytest
import torch
from safetensors.torch import save_file

from prl.engines.vllm.weights import WeightsError, refuse_other_model, shapes_at

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
        ({**STARTED, "b.weight": (5,)}, "b.weight"),
        ({"a.weight": (2, 3)}, "b.weight is missing"),
        ({**STARTED, "c.weight": (1,)}, "c.weight .* is not of this model"),
        ({**STARTED, "lm_head.weight": (9,)}, "lm_head.weight .* is not of this model"),
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
