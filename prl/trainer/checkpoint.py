"""Checkpoints of the policy as Hugging Face folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from prl.trainer.model import save_weights
from prl.wire.files import announce, checkpoint_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_checkpoint(run_dir: Path, step: int, model: "PreTrainedModel", model_config: Mapping[str, Any]) -> None:
    """Write the float32 weights of `step`, the tokenizer and the generation config, as a whole or not at all.

    Args:
        run_dir: the run directory; the folder is `checkpoints/step_<step>` in it.
        step: the last step that the weights were trained in, 0 for the base model.
        model: the policy.
        model_config: the `model` node of the config, whose `path` has the tokenizer.
    """
    final = checkpoint_path(run_dir, step)
    folder = final.with_name(f".{final.name}")
    save_weights(model, folder, torch.float32)
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string())  # end-of-turn tokens
    tokenizer = AutoTokenizer.from_pretrained(model_config["path"], trust_remote_code=model_config["trust_remote_code"])
    tokenizer.save_pretrained(folder)
    announce(folder, final)
