"""Small random models that see, pictures for them, and samples with pictures."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from prl.config.trainer import AdamWConfig
from prl.losses import default_loss
from prl.models import model_path
from prl.rollouts.inputs import Picture
from prl.rollouts.messages import MicroBatch, Reference, StepBatch, TrainingSample
from prl.rollouts.packing import pack
from prl.rollouts.pictures import PictureStore, hash_of
from prl.trainer.model import load_model, save_weights
from prl.trainer.trainer import Trainer

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
MERGED = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
QWEN = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"} | MERGED,
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"} | MERGED,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "llava": {
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", "crop_size": 12},
        "processor_config.json": {"processor_class": "LlavaProcessor", "patch_size": 4},
    },
}
"""Files of the processors of each."""


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
    for file in Path(model_path("tiny")).glob("tokenizer*"):
        shutil.copy(file, folder)
    for name, settings in PROCESSORS[kind].items():
        (folder / name).write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
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


class Pictures:
    """Random pictures of a model, and samples that have them."""

    def __init__(self, config: Any, store: PictureStore | None = None):
        made = [picture_of(config, seed, store) for seed in range(6)]
        self.pictures = [picture for picture, _ in made]
        self.features = {picture.features: features for picture, features in made}

    def sample(self, *parts: int | list[int], seed: int = 0, **fields: Any) -> TrainingSample:
        """Return a sample of text, as token ids, and pictures, by number; what is behind the last part trains."""
        draw, ids, pictures = random.Random(seed), list[int](), list[Picture]()
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            picture = self.pictures[part].moved(len(ids) + 1)
            pictures.append(picture)
            ids += [STARTS, *[PLACEHOLDER] * picture.length, ENDS]
        prompt = len(ids)
        ids += [draw.randrange(250) for _ in range(3 + seed % 4)]
        on = [float(place >= prompt) for place in range(len(ids))]
        given = {"advantages": [draw.choice([-1.0, 0.5]) * each for each in on]} | fields
        mask, logprobs = list(map(bool, on)), [-5.7 * each for each in on]
        return TrainingSample(ids, mask, logprobs, [1.0] * len(ids), "x", 0.0, pictures=pictures or None, **given)

    def samples(self) -> list[TrainingSample]:
        """Return samples with none, one and several pictures, some of them shared; two have the same text."""
        return [
            self.sample([1, 2, 3], 0, [4, 5], seed=1),
            self.sample([1, 2, 3], 0, [4, 5], seed=2),
            self.sample([1, 2, 3], 1, [4, 5], seed=1),
            self.sample([8, 9], [3, 4], seed=3),
            self.sample([1, 2, 3], 0, [4], 2, [7, 8], 3, seed=4),
            self.sample([1, 2], 0, [3], 0, [4], seed=5),
            self.sample(4, seed=6),
        ]


def step(
    folder: Path, rows: list[MicroBatch], features: Any, *, rank: int = 0, options: dict[str, Any] | None = None
) -> tuple[Trainer, dict[str, float]]:
    """Return the trainer of a model folder after one step, and its metrics."""
    load = [load_model(str(folder), device=torch.device("meta" if rank else "cpu")) for _ in range(2)]
    given = {"device": "cpu", "optim": AdamWConfig(lr=1e-3, eps=1e-4), "tokens_per_forward": 64} | (options or {})
    trainer = Trainer(
        model=load[0],
        rl_losses={"": default_loss},
        max_steps=1,
        references={"initial": lambda: load[1]},
        features=lambda picture: features[picture.features],
        **given,
    )
    return trainer, trainer.train_step(StepBatch(1, rows, 0))


def step_samples(pictures: Pictures) -> list[TrainingSample]:
    """Return samples of which some are compared with a reference."""
    dense = {"reference": Reference("initial", "reverse_kl", prefix=(7, 8, 9)), "advantages": None}
    kl = [pictures.sample([1, 2, 3], number, [6], seed=8 + number, **dense) for number in (2, 5)]
    for sample in kl:
        sample.ref_kl_weights, sample.rl_weights = list(map(float, sample.mask)), [0.0] * len(sample.mask)
    return pictures.samples() + kl


def rows_of(pictures: Pictures, ranks: int) -> list[list[MicroBatch]]:
    """Return the rows of each rank; the last of two has none with a picture."""
    samples = step_samples(pictures)
    if ranks == 1:
        return pack(samples, 64, 1)[0]
    with_pictures = [sample for sample in samples if sample.pictures]
    without = [sample for sample in samples if not sample.pictures]
    return [pack(part, 64, 1)[0][0] for part in (with_pictures, without)]


def main(folder: Path, kinds: list[str], rank: int) -> None:
    """One of two ranks: a step on each model in `folder`, whose weights then are in `<kind> of two`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for kind in kinds:
        pictures = Pictures(config_of(kind))
        trainer, _ = step(folder / kind, rows_of(pictures, 2)[rank], pictures.features, rank=rank)
        save_weights(trainer.model, None if rank else folder / f"{kind} of two", torch.float32)
    dist.destroy_process_group()


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
