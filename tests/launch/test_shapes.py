"""A config.json and weights that disagree are refused before a process starts; whatever loads passes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prl.compose import compose
from prl.config.schema import InferenceConfig, ModelConfig
from prl.errors import ConfigError
from prl.launch.builder import prepare
from prl.launch.checks import check_loadable
from prl.launch.shapes import build, check_shapes, head_size, setting
from prl.models import model_path

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1, "head_dim": 8}
PATCHES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
}
GEMMA3 = {
    "text_config": SMALL | {"head_dim": 8},
    "vision_config": PATCHES | {"patch_size": 4},
    "mm_tokens_per_image": 4,
    "image_token_index": 40,
}
MODELS = {
    "tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "untied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "experts": ("Qwen3Moe", EXPERTS | {"num_experts": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "head_dim": 8}),
    "wrapper": ("Gemma3", GEMMA3),
}


def saved(name, folder):
    """A folder with random weights as transformers saves them."""
    kind, values = MODELS[name]
    shared = {} if name == "wrapper" else {"vocab_size": 48} if name == "gpt2" else SMALL
    config = getattr(transformers, f"{kind}Config")(**shared | values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny model, to be changed."""
    return Path(shutil.copytree(model_path("tiny"), tmp_path / "model"))


def change(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def check(folder, *, trained, **node):
    elsewhere = InferenceConfig(urls=["http://127.0.0.1:9"])  # an engine here would refuse small heads
    check_loadable(ModelConfig(path=str(folder), max_model_len=32, **node), elsewhere, "model.", trained=trained)


def refused(folder, *, trained=True):
    with pytest.raises(ConfigError) as caught:
        check(folder, trained=trained)
    said = str(caught.value)
    assert said.startswith(f"model.path={str(folder)!r}: ") and "\n" not in said
    return said.removeprefix(f"model.path={str(folder)!r}: ")


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_has_saved_passes(tmp_path, name, capfd, monkeypatch):
    monkeypatch.setattr("prl.trainer.architecture.find_spec", lambda name: "there")  # for the engine of `wrapper`
    folder = saved(name, tmp_path / "model")
    capfd.readouterr()
    check(folder, trained=False)
    if name != "gemma2":  # the trainer's architectures
        check(folder, trained=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("trained", [True, False])
def test_layers_beside_the_models_own_and_buffers_of_old_pass(folder, trained):
    """As those that predict a second token, which stand in the files with a layer's number."""
    tensors = load_file(folder / "model.safetensors")
    extra = {name.replace("layers.3.", "layers.4."): torch.zeros_like(value) for name, value in tensors.items()}
    extra |= {"model.layers.4.eh_proj.weight": torch.zeros(2, 2), "mtp.layers.0.mlp.weight": torch.zeros(2, 2)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)
    save_file(extra | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check(folder, trained=trained)


@pytest.mark.parametrize("trained", [True, False])
def test_a_tied_head_that_was_saved_or_alone_and_names_without_the_prefix_pass(folder, trained):
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    for changed in (
        tensors | {"lm_head.weight": rows.clone()},
        {n: v for n, v in tensors.items() if v is not rows} | {"lm_head.weight": rows},
        {name.removeprefix("model."): value for name, value in tensors.items()},
    ):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        check(folder, trained=trained)


def test_files_that_are_not_loaded_are_not_compared(folder):
    save_file({"layers.0.wq": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    check(folder, trained=True)
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    check(folder, trained=False)


def test_shards_are_read_by_their_index(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink()
    check(folder, trained=True)
    change(folder, intermediate_size=100)
    assert "mlp.gate_proj.weight" in refused(folder)


def test_quantized_weights_and_code_of_the_models_own_are_left_to_who_loads_them(folder):
    change(folder, hidden_size=256, quantization_config={"quant_method": "fp8"})
    check(folder, trained=False)
    (folder / "config.json").write_text((Path(model_path("tiny")) / "config.json").read_text())
    change(folder, hidden_size=256, auto_map={"AutoModelForCausalLM": "own.Model"})
    check(folder, trained=False, trust_remote_code=True)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"hidden_size": 256},
            "model.embed_tokens.weight has shape [304, 128] in its weights and [304, 256] by its conf",
        ),
        (
            {"vocab_size": 320},
            "model.embed_tokens.weight has shape [304, 128] in its weights and [320, 128] by its conf",
        ),
        (
            {"intermediate_size": 100},
            "model.layers.0.mlp.gate_proj.weight has shape [384, 128] in its weights and [100, 128] by its config.json "
            "(and 11 more): give the config.json that the weights were saved with",
        ),
        (
            {"num_attention_heads": 3},
            "model.layers.0.self_attn.q_proj.weight has shape [128, 128] in its weights and [96",
        ),
        (
            {"hidden_size": -4},
            "no model can be built of its config.json (Trying to create tensor with negative dimension -4",
        ),
        (
            {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5},
            "its config.json wants model.layers.4.self_attn.q_proj.weight of shape [128, 128], which its weights lack",
        ),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "its weights have model.layers.3.input_layernorm.weight of shape [128], a layer beyond those of its config",
        ),
    ],
)
def test_a_config_of_other_weights(folder, values, says, trained):
    change(folder, **values)
    assert refused(folder, trained=trained).startswith(says)


def test_a_head_that_is_missing_for_the_trainer(folder):
    change(folder, tie_word_embeddings=False)
    assert refused(folder).startswith(
        "its config.json wants lm_head.weight of shape [304, 128], which its weights lack:"
    )


def test_heads_that_do_not_divide(tmp_path):
    folder = saved("llama", tmp_path / "model")
    change(folder, num_attention_heads=5, head_dim=None)
    assert "num_attention_heads" in refused(folder) or "attention heads" in refused(folder)


def test_experts_are_compared_as_they_are_fused_in_loading(tmp_path):
    folder = saved("experts", tmp_path / "model")
    change(folder, moe_intermediate_size=14)
    assert refused(folder, trained=False).startswith(
        "model.layers.0.mlp.experts.gate_up_proj has shape [3, 24, 32] in "
    )


def test_it_is_asked_of_the_teachers_model_too_before_anything_starts(folder):
    change(folder, hidden_size=256)
    base = ("run.name=x", "envs.math.args.num_tasks=8", "envs.math.eval_args=null", "inference.device=cpu")
    for key, overrides in (("model.path", ()), ("teacher.model.path", ("algo=opd",))):
        with pytest.raises(ConfigError) as caught:
            prepare(compose([*base, *overrides, f"{key}={folder}"]))
        assert str(caught.value).startswith(f"{key}={str(folder)!r}: model.embed_tokens.weight has shape [304, 128]")


def test_the_config_is_left_as_it_was(folder):
    config = AutoConfig.from_pretrained(folder)
    check_shapes(ModelConfig(path=str(folder), max_model_len=32), config, "m", trained=True)
    assert config.to_dict() == AutoConfig.from_pretrained(folder).to_dict()


@pytest.mark.parametrize(
    ("shape", "head"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 40}, 40),
        ({"hidden_size": 64, "num_attention_heads": 2}, None),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 64}, None),
    ],
)
def test_heads_that_an_engine_on_a_cpu_has_no_kernel_for(tmp_path, shape, head):
    """`head` is the size to be named; None: it is served."""
    config = transformers.LlamaConfig(**SMALL | shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), max_model_len=32)
    check_loadable(model, InferenceConfig(urls=["http://127.0.0.1:9"]), "model.", trained=True)  # it runs elsewhere
    if head is None:
        check_loadable(model, InferenceConfig(device="cpu"), "teacher.model.", trained=True)
        return
    with pytest.raises(ConfigError) as caught:
        check_loadable(model, InferenceConfig(device="cpu"), "teacher.model.", trained=True)
    said = f"its attention heads have {head} dimensions, and vLLM's engine on a CPU takes heads of 32, 64, 80, "
    assert str(caught.value).startswith(f"teacher.model.path={str(tmp_path)!r}: {said}")


def test_latent_attention_is_for_an_engine_on_a_gpu(tmp_path):
    """On a CPU vLLM 0.31 has it for 512 + 64 dimensions alone, and its logprobs were off by 0.3 there."""
    sizes = SMALL | {"kv_lora_rank": 512, "q_lora_rank": 16, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16}
    sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8, "v_head_dim": 16}
    served = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_experts_per_tok": 2}
    config = transformers.DeepseekV3Config(**sizes | served)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), max_model_len=32)
    check_loadable(model, InferenceConfig(urls=["http://127.0.0.1:9"]), "model.", trained=True)  # it runs elsewhere
    with pytest.raises(ConfigError, match=r"latent attention \(kv_lora_rank\), as a deepseek_v3 has, vLLM"):
        check_loadable(model, InferenceConfig(device="cpu"), "model.", trained=True)


def test_layers_with_heads_of_their_own_are_known_by_the_largest():
    """Gemma 4: 256 within a window and 512 without."""
    config = transformers.AutoConfig.for_model("gemma4_text")
    assert (head_size(config), setting(config, "hidden_size")) == (512, config.hidden_size)


def test_a_model_of_images_is_not_trained():
    with pytest.raises(ConfigError, match=r"^m: qwen3_vl is no causal language model of transformers"):
        build(transformers.AutoConfig.for_model("qwen3_vl"), "m", trained=True)
