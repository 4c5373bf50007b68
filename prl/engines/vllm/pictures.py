"""Pictures in requests, as vLLM takes them: features of the run's store, by the fields of vLLM's own processor.

vLLM's own processor makes none of them: the engine sees the tokens and the pixels that the renderer made.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from prl.engines.protocol import GenerateRequest
from prl.rollouts.inputs import Picture
from prl.rollouts.pictures import PictureStore

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.inputs.engine import EngineInput
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.multimodal.processing import BaseMultiModalProcessor

IMAGE = "image"
"""vLLM's name for pictures."""
SIDE = 64
"""Sides of the picture whose features show which ones the model takes, pixels."""


class Pictures:
    """Makes vLLM's inputs of pictures.

    Args:
        processor: vLLM's of the model.
        read_in_core: The engine core reads the features, so that none go from the server to it.
    """

    def __init__(self, processor: "BaseMultiModalProcessor", *, read_in_core: bool = False):
        self.processor, self.read_in_core = processor, read_in_core
        self.store = functools.cache(lambda folder: PictureStore(Path(folder)))
        self._lock = Lock()  # the engine core takes requests in two threads

    def input_of(self, asked: GenerateRequest) -> "EngineInput":
        """Return a prompt with its pictures. Raises ValueError where they are not there, or do not fit it."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        placeholders = sum(picture.length for picture in asked.pictures)
        found = asked.token_ids.count(getattr(self.processor.info.get_hf_config(), "image_token_id", -1))
        if found != placeholders:
            raise ValueError(f"the prompt has {found} placeholders, its pictures have {placeholders}")
        if not asked.pictures:
            return tokens_input(asked.token_ids, cache_salt=asked.cache_salt)
        names = [f"{picture.features}:{picture.digest}:{asked.picture_folder}" for picture in asked.pictures]
        items = MultiModalKwargsItems({IMAGE: list(map(self.item, names))})
        self._check_places(asked, items)
        if self.read_in_core:
            items = MultiModalKwargsItems({IMAGE: [None] * len(names)})
        places = [PlaceholderRange(picture.start, picture.length) for picture in asked.pictures]
        return mm_input(asked.token_ids, items, {IMAGE: names}, {IMAGE: places}, cache_salt=asked.cache_salt)

    def item(self, name: str) -> "MultiModalKwargsItem":
        """Return the features of a picture, by the name that vLLM has for it: their hash, its digest and its folder.

        Raises ValueError where they are not there, or where the model takes others.
        """
        import torch
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        features, digest, folder = name.split(":", 2)
        with self._lock:
            arrays = self.store(folder).features(Picture(0, 0, digest, 0, 0, features))
        tensors = {key: torch.from_numpy(values) for key, values in arrays.items()}
        inputs = BatchFeature(self.processor.info.ctx._postprocess_output(tensors))  # in the model's number format
        if kinds_of(inputs) != self._kinds:
            raise ValueError(f"the features of the picture {digest[:12]} are not those that this model takes")
        fields = self.processor._get_mm_fields_config(inputs, {})
        [item] = MultiModalKwargsItems.from_hf_inputs(inputs, fields)[IMAGE]
        return item

    @functools.cached_property
    def _kinds(self) -> dict[str, Any]:
        """The kinds of features that the model takes."""
        black = self.processor.info.parse_mm_data({IMAGE: [np.zeros((SIDE, SIDE, 3), np.uint8)]})
        made = self.processor._apply_hf_processor_main(black, {})
        fields = self.processor._get_mm_fields_config(made, {})
        return kinds_of({key: made[key] for key in fields if key in made})

    def _check_places(self, asked: GenerateRequest, items: Any) -> None:
        """Raise ValueError unless the pictures are where vLLM would place them: others would end the engine core."""
        # They are asked for no more than their sizes: each has one number in memory.
        images = [np.broadcast_to(np.uint8(0), (picture.height, picture.width, 3)) for picture in asked.pictures]
        parsed = self.processor.info.parse_mm_data({IMAGE: images})
        updates = self.processor._get_mm_prompt_updates(parsed, {}, items)
        found = self.processor._find_mm_placeholders(asked.token_ids, updates).get(IMAGE, [])
        places = [(place.start_idx, place.start_idx + place.length) for place in found]
        if places != [(picture.start, picture.stop) for picture in asked.pictures]:
            raise ValueError(f"the prompt has its pictures in the places {places}, which are not those that it names")


def kinds_of(features: "Mapping[str, Tensor]") -> dict[str, Any]:
    """Return the number format and the shape of features by name; the first dimension depends on the picture."""
    return {name: (values.dtype, values.shape[1:]) for name, values in features.items()}
