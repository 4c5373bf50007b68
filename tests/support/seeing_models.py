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
