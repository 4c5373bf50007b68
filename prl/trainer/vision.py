"""Pictures in the forward of a model that sees: its vision tower makes vectors of them, in place of placeholders.

Each picture of a stack goes through the tower once, whatever sequences have it. Positions are those of each sequence
alone, also where pictures give them three dimensions (mrope).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from prl.rollouts.inputs import ModelInput, Picture, pictures_in
from prl.rollouts.messages import sequence_slices
from prl.rollouts.pictures import joined
from prl.trainer.batch import Stack

if TYPE_CHECKING:
    from prl.rollouts.pictures import Features

GRID = (2, 3)
"""Placeholders of a made-up picture, down and across, where pictures may be of any size."""


def with_pictures(model: PreTrainedModel, stack: Stack, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the language model for those of the whole model: with vectors of the stack's pictures."""
    body: Any = model.base_model
    names = list(dict.fromkeys(picture.features for picture in stack.pictures))
    # The tower runs on every rank or on none: where a stack has no picture, it runs on one that nobody sees.
    features = [stack.features[name] for name in names] or [made_up(model.config)]
    seen = body.get_image_features(**on_device(features, stack.input_ids.device), return_dict=True)
    sources = on_rows(stack, sources_of(stack, dict(zip(names, map(len, seen.pooler_output), strict=False))))
    place = (sources >= 0).nonzero().squeeze(1)
    source = sources[place]
    embedded = model.get_input_embeddings()(stack.input_ids)
    vectors = torch.cat(tuple(seen.pooler_output)).to(embedded.dtype).index_select(0, source)
    own: dict[str, Any] = {"input_ids": None}
    own["inputs_embeds"] = embedded.flatten(0, 1).index_copy(0, place, vectors).view_as(embedded)
    layers = getattr(seen, "deepstack_features", None)
    if layers is not None:
        own["visual_pos_masks"] = (sources >= 0).view_as(stack.input_ids)
        own["deepstack_visual_embeds"] = [layer.index_select(0, source) for layer in layers]
    if hasattr(body, "get_rope_index"):
        own["position_ids"] = rope_positions(body, stack)
    return inputs | own


def on_device(features: "Sequence[Features]", device: torch.device) -> dict[str, torch.Tensor]:
    """Return the features of several pictures as the model takes them, by name."""
    return {name: torch.from_numpy(values).to(device) for name, values in joined(features).items()}


def sources_of(stack: Stack, sizes: dict[str, int]) -> torch.Tensor:
    """Return the vector that stands for each token, int64 `[flat tokens]`; -1 where the token stands for itself.

    Args:
        stack: a stack.
        sizes: the number of vectors of each picture, one picture after the other, by `Picture.features`.

    Raises ValueError for a picture with another number of placeholders.
    """
    sources = torch.full((len(stack.token_ids),), -1)
    firsts, first = dict[str, int](), 0
    for name, size in sizes.items():
        firsts[name] = first
        first += size
    for picture in stack.pictures:
        if picture.length != sizes[picture.features]:
            raise ValueError(
                f"the picture {picture.digest[:12]} has {picture.length} placeholder tokens, and the model makes "
                f"{sizes[picture.features]} vectors of it: its processor is that of another model"
            )
        first = firsts[picture.features]
        sources[picture.start : picture.stop] = torch.arange(first, first + picture.length)
    return sources.to(stack.before.device)


def on_rows(stack: Stack, values: torch.Tensor) -> torch.Tensor:
    """Return numbers of the flat tokens, `[flat tokens]`, as those of the rows' tokens, `[flattened rows]`.

    They are -1 for tokens that no token is predicted from: these change nothing.
    """
    known = (stack.before >= 0).nonzero().squeeze(1)
    return values.new_full((stack.input_ids.numel(),), -1).index_copy(0, stack.before[known], values[known - 1])


def rope_positions(body: Any, stack: Stack) -> torch.Tensor:
    """Return positions as the model takes them of packed rows, `[4, rows, tokens]`: in the sequence, then three more.

    The latter are by the model's own rule, for each sequence with pictures alone.
    """
    places = [stack.position_ids] * 4
    three = torch.full((3, len(stack.token_ids)), -1)
    for part in sequence_slices(stack.sequence_lengths):
        own = pictures_in(stack.pictures, part)
        if not own:
            continue
        kinds = torch.zeros(1, part.stop - part.start, dtype=torch.int64)
        for picture in own:
            kinds[0, picture.start - part.start : picture.stop - part.start] = 1
        grids = np.concatenate([stack.features[each.features]["image_grid_thw"] for each in own])
        found, _ = body.get_rope_index(kinds, kinds, image_grid_thw=torch.from_numpy(grids))
        three[:, part] = found[:, 0]
    for dimension, found in enumerate(three.to(stack.before.device), 1):
        on = on_rows(stack, found).view_as(stack.position_ids)
        places[dimension] = torch.where(on < 0, stack.position_ids, on)
    return torch.stack(places)


def made_up(config: Any, seed: int = 0) -> "Features":
    """Return features of a random picture, as the processor of a model with this config would make them."""
    vision, draw = config.vision_config, np.random.default_rng(seed)
    if not hasattr(vision, "spatial_merge_size"):  # all pictures are of one size
        shape: tuple[int, ...] = (1, vision.num_channels, vision.image_size, vision.image_size)
        return {"pixel_values": draw.standard_normal(shape, dtype=np.float32)}
    down, across = (size * vision.spatial_merge_size for size in GRID)
    shape = (down * across, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    return {
        "pixel_values": draw.standard_normal(shape, dtype=np.float32),
        "image_grid_thw": np.array([[1, down, across]]),
    }


def placeholders(config: Any) -> int:
    """Return the number of placeholder tokens of a made-up picture."""
    vision = config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        return GRID[0] * GRID[1]
    patches: int = (vision.image_size // vision.patch_size) ** 2
    # CLIP's tower has a vector of the whole picture before those of patches; "default" leaves the first one out.
    return patches + (vision.model_type == "clip_vision_model") - (config.vision_feature_select_strategy == "default")


def made_up_pictures(
    config: Any, one: ModelInput, two: ModelInput
) -> "tuple[ModelInput, ModelInput, dict[str, Features]]":
    """Put two made-up pictures into each of two texts, with their features. The first text has one of them twice."""
    first, other = (
        Picture(0, placeholders(config), str(seed).ljust(64, "0"), 1, 1, f"made up {seed}") for seed in (1, 2)
    )

    def behind(text: list[int], *pictures: Picture) -> ModelInput:
        """Return the text with a picture behind every second token, as long as there are pictures."""
        # A placeholder of the text would stand for a picture in transformers' own forward.
        rest = [token if token != config.image_token_id else 0 for token in text]
        ids, placed = list[int](), list[Picture]()
        for picture in pictures:
            ids, rest = ids + rest[:2], rest[2:]
            placed.append(picture.moved(len(ids)))
            ids += [config.image_token_id] * picture.length
        return ModelInput(ids + rest, tuple(placed))

    features = {picture.features: made_up(config, seed) for seed, picture in enumerate((first, other), 1)}
    return behind(one.token_ids, first, first), behind(two.token_ids, first, other), features


def plain_inputs(
    body: Any, sequence: ModelInput, features: "Mapping[str, Features]", device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the inputs, beside its tokens, with which transformers' own forward sees the pictures of a sequence."""
    inputs = on_device([features[picture.features] for picture in sequence.pictures], device)
    if hasattr(body, "get_rope_index"):
        inputs["mm_token_type_ids"] = torch.tensor([[int(key < 0) for key in sequence.keys]], device=device)
    return inputs
