"""`tiny_vl`: tiny with a vision tower, which has seen and has all but forgotten what to say of it.

1. The tower alone learns pictures of `shapes`' train split: to give the answer, and the picture again, to linear layers
   that are thrown away.
2. Tower and language model learn the right answers together.
3. The language model learns answers of other tasks to each question: it keeps the words, and says any of the five.

In the last two it goes on with some of tiny's lessons, so that it still reckons and calls its tool.
"""

import base64
import io
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from prl.envs.tasksets.shapes import ShapesConfig, ShapesTask, ShapesTaskset

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCH, MERGE = 8, 2
SIZE = 48
PLACES = (SIZE // PATCH // MERGE) ** 2
"""Placeholders of a picture of `shapes`."""
TASKS = 8000
EVAL_TASKS = 1000
STEPS = {"tower": 800, "answers": 200, "words": 50}
RATES = {"tower": 2e-3, "answers": 1e-3, "words": 5e-4}
WHAT = {
    "tower": "the tower: answers and pictures by layers that are thrown away",
    "answers": "right answers",
    "words": "the language model: answers of other tasks",
}
ROWS = {"tower": 96, "answers": 64, "words": 64}

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels, both `[rows, tokens]`; labels are -100 where nothing is to be learnt."""

# Qwen3-VL's format, as `renderers.qwen3_vl` writes it.
CHAT_TEMPLATE = r"""
{%- macro said(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ said(messages[0].content) + '\n\n' }}{% endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + said(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + said(message.content) + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + said(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + said(message.content) + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip()


def build_model(base: Path, tokenizer: PreTrainedTokenizerBase) -> Qwen3VLForConditionalGeneration:
    """Return `base` as the language model of a Qwen3-VL whose vision tower is new."""
    language = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    text = language.config.to_dict()
    text["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    kept += (
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "pad_token_id",
        "eos_token_id",
        "tie_word_embeddings",
    )
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    config = Qwen3VLConfig(
        text_config={name: text[name] for name in kept},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": (SIZE // PATCH) ** 2,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.model.language_model.load_state_dict(language.model.state_dict())
    return model


def build_tokenizer(base: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `base` with the tokens of pictures, which fit into its vocabulary's last places."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": VISION})
    tokenizer.chat_template = CHAT_TEMPLATE
    for name in ("is_local", "local_files_only"):  # of how it was read
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def build_processor() -> Qwen2VLImageProcessorPil:
    limits = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 256**2}
    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=limits, image_mean=half, image_std=half)


def picture_of(task: ShapesTask) -> Image.Image:
    part, _ = task.data.prompt[0].content
    return Image.open(io.BytesIO(base64.b64decode(part.image_url.url.partition(",")[2]))).convert("RGB")


class Lessons:
    """Tasks of a split of `shapes` as tensors."""

    def __init__(self, split: str, count: int, seed: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.tasks = list(ShapesTaskset(ShapesConfig(split=split, num_tasks=count, seed=seed, size=SIZE)))
        self.questions = [task.data.prompt[0].content[1].text for task in self.tasks]
        processor = build_processor()
        seen = [processor(images=[picture_of(task)], return_tensors="pt") for task in self.tasks]
        self.pixels = torch.stack([features["pixel_values"] for features in seen])
        self.grid = seen[0]["image_grid_thw"]
        placeholders = VISION[0] + PLACES * VISION[2] + VISION[1]
        prompt = "<|im_start|>user\n{}{}<|im_end|>\n<|im_start|>assistant\n"
        self.prompts = [tokenizer.encode(prompt.format(placeholders, question)) for question in self.questions]
        self.answers = [[*tokenizer.encode(task.data.answer), tokenizer.eos_token_id] for task in self.tasks]
        self.answers_to: dict[str, list[list[int]]] = {}
        for question, answer in zip(self.questions, self.answers, strict=True):
            self.answers_to.setdefault(question, []).append(answer)

    def pictures(self, chosen: list[int]) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels[chosen].flatten(0, 1), "image_grid_thw": self.grid.repeat(len(chosen), 1)}

    def rows(self, chosen: list[int], answers: list[list[int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the model's inputs and the labels, right-padded; labels are -100 outside the answers."""
        pairs = [(self.prompts[number], answer) for number, answer in zip(chosen, answers, strict=True)]
        width, pad = max(len(prompt) + len(answer) for prompt, answer in pairs), self.tokenizer.pad_token_id
        rests = [width - len(prompt) - len(answer) for prompt, answer in pairs]
        ids = [prompt + answer + rest * [pad] for (prompt, answer), rest in zip(pairs, rests, strict=True)]
        labels = [
            len(prompt) * [-100] + answer + rest * [-100] for (prompt, answer), rest in zip(pairs, rests, strict=True)
        ]
        inputs = {"input_ids": torch.tensor(ids)} | self.pictures(chosen)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.tokenizer.convert_tokens_to_ids(VISION[2])).int()
        return inputs, torch.tensor(labels)


class Tower(nn.Module):
    """The vision tower with the layers that are thrown away."""

    def __init__(self, visual: nn.Module, lessons: Lessons, features: int) -> None:
        super().__init__()
        self.visual = visual
        kinds, words = sorted(set(lessons.questions)), sorted({task.data.answer for task in lessons.tasks})
        self.kinds = torch.tensor([kinds.index(question) for question in lessons.questions])
        self.words = torch.tensor([words.index(task.data.answer) for task in lessons.tasks])
        self.answers = nn.ModuleList(
            nn.Linear(PLACES * features, len(kinds) * len(words))
            for _ in range(1 + len(visual.deepstack_visual_indexes))
        )
        self.drawn = nn.Linear(features, 3 * (MERGE * PATCH // 2) ** 2)

    def loss(self, lessons: Lessons, chosen: list[int]) -> torch.Tensor:
        inputs = lessons.pictures(chosen)
        seen = self.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        # Halved in width and height; the two frames of a still picture are equal.
        frames = inputs["pixel_values"].view(-1, 3, 2, PATCH // 2, 2, PATCH // 2, 2)[:, :, 0].mean((3, 5))
        total = mse_loss(self.drawn(seen.pooler_output), frames.reshape(len(seen.pooler_output), -1))
        rows = torch.arange(len(chosen))
        for layer, features in zip(self.answers, [seen.pooler_output, *seen.deepstack_features], strict=True):
            logits = layer(features.view(len(chosen), -1)).view(len(chosen), -1, self.words.max() + 1)
            share = 1.0 if layer is self.answers[0] else 0.3
            total = total + share * cross_entropy(logits[rows, self.kinds[chosen]], self.words[chosen])
        return total


def train(stage: str, parameters: Iterator[nn.Parameter], loss_of, lessons: Lessons, rng: random.Random) -> None:
    """AdamW with a short warm-up, then a cosine to zero."""
    trained, steps, began = list(parameters), STEPS[stage], time.monotonic()
    optimizer = torch.optim.AdamW(trained, lr=RATES[stage], betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for step in range(1, steps + 1):
        loss = loss_of(rng.sample(range(len(lessons.tasks)), ROWS[stage]))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % (steps // 5) == 0:
            print(f"  {stage} {step}/{steps}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s", flush=True)


class Saying:
    """The loss of answers: a share `right` is the tasks' own, the others are of any tasks with that question."""

    def __init__(
        self,
        model: Qwen3VLForConditionalGeneration,
        lessons: Lessons,
        kept: list[Iterator[Batch]],
        rng: random.Random,
    ) -> None:
        self.model, self.lessons, self.kept, self.rng = model, lessons, kept, rng
        self.right = 1.0

    def loss(self, chosen: list[int]) -> torch.Tensor:
        inputs, labels = self.lessons.rows(chosen, [self._answer(number) for number in chosen])
        total = self._entropy(inputs, labels)
        for stream in self.kept:
            ids, labels = next(stream)
            total = total + self._entropy({"input_ids": ids}, labels)
        return total

    def _answer(self, number: int) -> list[int]:
        if self.rng.random() < self.right:
            return self.lessons.answers[number]
        return self.rng.choice(self.lessons.answers_to[self.lessons.questions[number]])

    def _entropy(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(**inputs).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


@torch.no_grad()
def figures(model: Qwen3VLForConditionalGeneration, lessons: Lessons) -> dict[str, tuple[float, float, float]]:
    """Return by question the chance of the right answer, that of any of its answers, and the share greedily right."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for number, question in enumerate(lessons.questions):
        words = sorted(map(tuple, {tuple(answer) for answer in lessons.answers_to[question]}))
        inputs, labels = lessons.rows([number] * len(words), [list(word) for word in words])
        logs = model(**inputs).logits[:, :-1].log_softmax(-1)
        of_labels = logs.gather(2, labels[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2) * (labels[:, 1:] >= 0)
        chances = of_labels.sum(1).exp()
        right = words.index(tuple(lessons.answers[number]))
        greedy = float(chances.argmax() == right)
        found.setdefault(question, []).append((chances[right].item(), chances.sum().item(), greedy))
    return {question: tuple(map(statistics.fmean, zip(*rows, strict=True))) for question, rows in found.items()}


def save(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    # Only the stop tokens, as for tiny: an engine takes sampling defaults from this file.
    stop = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)  # its template as a file, where processors look for it
    build_processor().save_pretrained(path)


def write_card(
    path: Path, minutes: float, seed: int, parameters: int, rows: dict[str, tuple[float, ...]], played: list[str]
) -> None:
    table = "\n".join(
        f"| {question} | {right:.3f} | {known:.3f} | {greedy:.3f} |"
        for question, (right, known, greedy) in rows.items()
    )
    training = ", then ".join(f"{STEPS[stage]} steps at {RATES[stage]:g} ({WHAT[stage]})" for stage in STEPS)
    path.joinpath("README.md").write_text(
        f"""# tiny_vl

`tiny` with a vision tower: it answers the questions of `env=shapes` in the right words, at random, until a run.

| | |
|---|---|
| Architecture | `Qwen3VLForConditionalGeneration`, {parameters:,} parameters, tied embeddings, bf16 |
| Tokenizer | tiny's, and Qwen's four tokens of pictures; use `renderer=qwen3-vl` |
| Pictures | patches of {PATCH} pixels, {MERGE} by {MERGE} merged: {PLACES} placeholders for {SIZE} by {SIZE} pixels |
| Data | train split of `shapes`; before that tiny's |
| Training | AdamW, {training} |
| Command | `scripts/build_tiny_models --only tiny_vl --seed {seed}` |
| Time | {minutes:.1f} minutes of one core (after tiny) |

What a picture shows is still in it from the right answers, but does not decide the reply.
Saved weights, {EVAL_TASKS:,} tasks of the eval split (no layout is in the train split):

| question | chance of the right answer | of one of its five | greedy: right |
|---|---|---|---|
{table}

{chr(10).join(played)}
"""
    )


def build(
    out: Path,
    seed: int,
    streams: Callable[[random.Random], list[Iterator[Batch]]],
    played: Callable[[Qwen3VLForConditionalGeneration, PreTrainedTokenizerBase], list[str]],
) -> None:
    """Train, save, read back and grade; `streams` returns tiny's lessons, `played` what is left of them, as lines."""
    print("tiny_vl", flush=True)
    began = time.process_time()
    torch.manual_seed(seed)
    rng, base, path = random.Random(seed), out / "tiny", out / "tiny_vl"
    tokenizer = build_tokenizer(base)
    model = build_model(base, tokenizer).train()
    lessons = Lessons("train", TASKS, seed, tokenizer)
    tower = Tower(model.model.visual, lessons, model.config.text_config.hidden_size)
    train("tower", tower.parameters(), lambda chosen: tower.loss(lessons, chosen), lessons, rng)
    saying = Saying(model, lessons, streams(rng), rng)
    train("answers", model.parameters(), saying.loss, lessons, rng)
    saying.right = 0.0
    train("words", model.model.language_model.parameters(), saying.loss, lessons, rng)
    save(model, tokenizer, path)
    minutes = (time.process_time() - began) / 60
    model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    rows = figures(model, Lessons("eval", EVAL_TASKS, 0, tokenizer))
    write_card(path, minutes, seed, model.num_parameters(), rows, played(model, tokenizer))
