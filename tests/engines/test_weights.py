"""What a server takes for weights of its model, asked without an engine."""

from types import SimpleNamespace

import pytest
import torch
from architectures import config_of, write_model
from safetensors.torch import load_file, save_file

from prl.engines.vllm.weights import ServedModel, WeightsError
from prl.trainer.model import load_model, save_weights


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GLM-4-MoE"])
def test_a_server_whose_files_have_a_layer_beside_the_models_own_takes_what_the_trainer_writes(tmp_path, name):
    """As the one that predicts a second token, which transformers leaves out in loading."""
    start = write_model(tmp_path / "start", name, tied=False)
    file = start / "model.safetensors"
    save_file(load_file(file) | {"model.layers.46.eh_proj.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    save_weights(load_model(str(start), device=torch.device("cpu")), tmp_path / "written", torch.bfloat16)
    config = SimpleNamespace(
        hf_config=config_of(name, tied=False), model=str(start), revision=None, trust_remote_code=False
    )
    served = ServedModel(config)
    assert served.check(str(tmp_path / "written")) == str(tmp_path / "written")
    file = tmp_path / "written" / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.1.mlp.experts.7.up_proj.weight"
    save_file(tensors | {expert: tensors[expert][:-1].clone()}, file)
    with pytest.raises(WeightsError, match="missing"):
        served.check(str(tmp_path / "written"))
