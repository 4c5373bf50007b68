"""Changes of each layer of a model before it runs: recomputing its activations, compiling it."""

import functools

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from prl.trainer.architecture import language_of
from prl.trainer.sharding import layers_of
from prl.trainer.tree.attention import NAME, tree_attention

ATEN = torch.ops.aten
EXPERTS = ATEN._grouped_mm.default
KEPT = [
    ATEN.mm.default,
    ATEN.addmm.default,
    EXPERTS,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_fused_attention_overrideable.default,
]
"""Operations that `selective` does not compute twice: products and attention, nearly all of a layer's arithmetic."""


def recompute_activations(model: PreTrainedModel, which: str) -> None:
    """Have layers compute activations again in the backward: `none`, `selective` (all but `KEPT`) or `full`.

    Experts with biases (gpt-oss) are computed again with `selective` too.
    """
    if which == "none":
        return
    options: dict[str, object] = {"use_reentrant": False}
    if which == "selective":
        biased = any(getattr(module, "has_bias", False) for module in model.modules())
        kept = [op for op in KEPT if op is not EXPERTS] if biased else KEPT  # they are added in place, to what is kept
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer; attention over trees, whose shapes differ from one stack to the next, stays as it is.

    So does a vision tower, whose pictures differ in size.
    """
    AttentionInterface.register(NAME, torch.compiler.disable(tree_attention))
    for layer in layers_of(language_of(model)):
        layer.compile()
