"""Small random models that see, pictures for them, and samples with pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from prl.rollouts.inputs import Picture
from prl.rollouts.pictures import PictureStore, hash_of

PLACEHOLDER, STARTS, ENDS = 300, 301, 302
TEXT: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MARKS = {"image_token_id": PLACEHOLDER, "vision_start_token_id": STARTS, "vision_end_token_id": ENDS}
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 3, "hidden_size": 32}
TOWER = PATCHES | {"intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "initializer_range": 0.15}
CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4}
SEEING: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE | {"mrope_interleaved": True}},
        "vision_config": TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        "video_token_id": 303,
        **MARKS,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": TOWER | {"fullatt_block_indexes": [1], "window_size": 16},
        "video_token_id": 303,
        **MARKS,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": CLIP | {"model_type": "clip_vision_model", "image_size": 12, "attention_dropout": 0.5},
        "image_token_index": PLACEHOLDER,
    },
}
"""Configs of models that are trained, by their kind."""


def config_of(kind: str, *, tied: bool = False) -> Any:
    """Return the config of a model that sees."""
    own = SEEING[kind]
    text = own["text_config"] | {"tie_word_embeddings": tied}
    return AutoConfig.for_model(kind, **own | {"text_config": text, "tie_word_embeddings": tied})


def write_model(folder: Path, kind: str, *, tied: bool = False) -> Path:
    """Write a model folder with random weights, as transformers writes it."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind, tied=tied), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms begin as nothing, and biases
                parameter += 0.1 * torch.randn_like(parameter)
            elif parameter.std() < 0.1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def picture_of(config: Any, seed: int, store: PictureStore | None = None) -> tuple[Picture, dict[str, np.ndarray]]:
    """Return a random picture at place 0 and its features; `Picture.length` is by their shape."""
    draw, vision = np.random.default_rng(seed), config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        down, across = int(draw.integers(1, 4)), int(draw.integers(1, 4))
        patches = down * across * vision.spatial_merge_size**2
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = draw.standard_normal((patches, size), dtype=np.float32)
        grid = np.array([[1, down * vision.spatial_merge_size, across * vision.spatial_merge_size]])
        features, length = {"pixel_values": pixels, "image_grid_thw": grid}, down * across
    else:
        features = {
            "pixel_values": draw.standard_normal((1, 3, vision.image_size, vision.image_size), dtype=np.float32)
        }
        length = (vision.image_size // vision.patch_size) ** 2
    digest = f"{seed:064x}"[::-1]  # keys are made of its beginning
    name = hash_of(features) if store is None else store.keep_features(digest, features)
    return Picture(0, length, digest, 1, 1, name), features


def plain_logprobs(
    model: PreTrainedModel, token_ids: list[int], pictures: list[Picture], features: dict[str, Any]
) -> torch.Tensor:
    """Return the logprob of each token but the first, by transformers' own forward of the sequence alone."""
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {}
    if pictures:
        own = [features[picture.features] for picture in pictures]
        inputs = {name: torch.from_numpy(np.concatenate([each[name] for each in own])) for name in own[0]}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
