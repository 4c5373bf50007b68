"""Folders of models that see, without weights: config, tokenizer, image processor and the family's chat template."""

import json

from PIL import Image

QWEN = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAVA = """\
{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}\
{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
GEMMA = """\
{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}\
{% if item['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ item['text'] | trim }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {"qwen3_vl": QWEN, "qwen2_5_vl": QWEN, "llava": LLAVA, "gemma3": GEMMA}
TOKENS = {
    "qwen": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "llava": ["<image>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<bos>"],
}
PATCHES = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}


def seeing_model(kind, folder, template=None):
    """Write a model of the kind, one of `TEMPLATES`, and return its path."""
    import transformers as hf

    from prl.models import model_path

    tokenizer = hf.AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True)
    tokens = TOKENS[kind if kind in TOKENS else "qwen"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template or TEMPLATES[kind]
    ids = dict(zip(tokens, tokenizer.convert_tokens_to_ids(tokens), strict=True))
    named, settings, config = {}, {}, {"model_type": kind, "vision_config": {}, "text_config": {}}
    if kind == "llava":
        images = hf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        settings = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        config |= {"image_token_index": ids["<image>"]}
    elif kind == "gemma3":
        images = hf.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        settings = {"image_seq_length": 5}
        named = {"boi_token": tokens[0], "eoi_token": tokens[1], "image_token": tokens[2], "bos_token": "<bos>"}
    else:
        images = hf.Qwen2VLImageProcessorPil(**PATCHES, size={"shortest_edge": 256, "longest_edge": 65536})
        config |= {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if settings:
        (folder / "processor_config.json").write_text(json.dumps(settings))
    if named:
        file = folder / "tokenizer_config.json"
        bos = {"bos_token": named.pop("bos_token")}
        file.write_text(json.dumps(json.loads(file.read_text()) | bos | {"extra_special_tokens": named}))
    return str(folder)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
TOWER |= {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3 = {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WEIGHED = {
    "qwen3_vl": (ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}, TOWER | QWEN3),
    "qwen2_5_vl": (
        ROPE | {"mrope_section": [6, 5, 5]},
        TOWER | {"window_size": 32, "fullatt_block_indexes": [1]},
    ),
    "llava": (ROPE, CLIP | {"num_attention_heads": 2, "patch_size": 8, "image_size": 16, "projection_dim": 32}),
}
"""Positions and vision tower of the models that are trained, by their kinds."""


def weighed_model(kind, folder):
    """Write a model of the kind, one of `WEIGHED`, with random weights, as transformers does, and return its path."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    path = seeing_model(kind, folder)
    ids = AutoTokenizer.from_pretrained(path).get_vocab()
    own = json.loads((folder / "config.json").read_text())
    rope, tower = WEIGHED[kind]
    text = SIZES | {"rope_parameters": rope, "eos_token_id": ids["<|im_end|>"]}
    marks = {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end") if kind != "llava"}
    text |= {"model_type": "llama"} if kind == "llava" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**own | marks | {"text_config": text, "vision_config": tower})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(folder)
    return path


def noise(width, height, seed=0):
    """Return a picture of random pixels."""
    import numpy

    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def part(reference):
    """Return the part of a message that shows a picture of the store."""
    return {"type": "image_url", "image_url": {"url": reference}}


def text(words):
    return {"type": "text", "text": words}
