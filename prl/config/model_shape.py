"""The sizes of a model, as arithmetic over the memory of engine and trainer takes them."""

from dataclasses import dataclass

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by its format."""


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of a vision tower."""

    layers: int
    hidden: int
    """Width of what passes from layer to layer."""
    intermediate: int
    """Width inside the MLP."""
    patches: int
    """Patches that a placeholder token stands for."""
    pixels: int
    """Numbers of a patch."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model."""

    parameters: int
    """All of them; those of a tied head once."""
    outside: int
    """Parameters that are in no layer."""
    layers: int
    layer: int
    """Parameters of one layer, the largest."""
    vocabulary: int
    """Rows of the head."""
    hidden: int
    """Width of what passes from layer to layer."""
    intermediate: int
    """Width inside the MLP; of experts, those that a token is given to."""
    heads: int
    kv_heads: int
    head_dim: int
    routed: int = 0
    """Experts that a token is given to; 0 = it has none."""
    adapters: int = 0
    """Parameters of adapters (LoRA), which are trained in place of the others; 0 = it has none."""
    frozen: int = 0
    """Parameters that are not trained (`model.freeze`)."""
    vision: VisionShape | None = None
    """The vision tower, where it is trained; None = it is not, or there is none."""

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return self.adapters or self.parameters - self.frozen

    @property
    def queries(self) -> int:
        """Floats of a token's queries in a layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Floats of a token's keys in a layer; its values have as many."""
        return self.kv_heads * self.head_dim
