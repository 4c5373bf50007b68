"""Models as their configs have them, without values, and those that an engine would get wrong."""

import pytest
import transformers
from transformers import AutoModelForCausalLM

from prl.config.schema import ModelConfig, VLLMConfig
from prl.errors import ConfigError
from prl.launch.checks import check_loadable
from prl.tools.dry_run.shape import build, setting


def test_latent_attention_is_for_an_engine_on_a_gpu(tmp_path):
    """On a CPU vLLM 0.31 has it for 512 + 64 dimensions alone, and its logprobs were off by 0.3 there."""
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "v_head_dim": 16}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64, "n_group": 1}
    sizes |= {"kv_lora_rank": 512, "q_lora_rank": 16, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "topk_group": 1}
    sizes |= {"n_routed_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    config = transformers.DeepseekV3Config(**sizes, topk_method="noaux_tc", scoring_func="sigmoid")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), max_model_len=32)
    check_loadable(model, VLLMConfig(urls=["http://127.0.0.1:9"]), "model.", trained=True)  # it runs elsewhere
    with pytest.raises(ConfigError, match=r"latent attention \(kv_lora_rank\), as a deepseek_v3 has, vLLM"):
        check_loadable(model, VLLMConfig(device="cpu"), "model.", trained=True)


def test_layers_with_heads_of_their_own_are_known_by_the_largest():
    """Gemma 4: 256 within a window and 512 without."""
    config = transformers.AutoConfig.for_model("gemma4_text")
    assert (setting(config, "head_dim"), setting(config, "hidden_size")) == (512, config.hidden_size)


def test_a_model_of_images_is_not_trained():
    with pytest.raises(ConfigError, match=r"^m: qwen3_vl is no causal language model of transformers"):
        build(transformers.AutoConfig.for_model("qwen3_vl"), "m", trained=True)
