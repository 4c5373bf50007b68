"""Shapes of chat templates that models come with, written anew after what they are documented to do, and tiny models.

The templates lie in `templates/`. Bytes are the tokens, and each mark of a shape is one more.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).with_name("templates")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THOUGHT = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
EMPTY = "<think>\n\n</think>\n\n"
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
TAGS_CALL = "\n".join(
    ("<tool_call>", "<function=add>", "<parameter=a>", "1", "</parameter>", "<parameter=b>", "2", "</parameter>")
)
TAGS_CALL += "\n</function>\n</tool_call>"
KEYS_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>"
)


@dataclass(frozen=True)
class Shape:
    name: str
    does: str
    """What it does otherwise than another template, for the table in experiments/benchmarks/renderers.md."""
    eos: str
    """The tokenizer's end of a text."""
    special: tuple[str, ...] = CHATML
    added: tuple[str, ...] = ()
    """Tokens of their own that are not special."""
    bos: str | None = None
    ends: tuple[str, ...] = ()
    """What generation_config.json has a reply end with; empty = `eos` alone."""
    end: str = ""
    """What ends a reply in a conversation; empty = `eos`."""
    thinks: str = ""
    """How a reply with the thought R begins, after the generation prompt; empty = it does not think."""
    shows: str = ""
    """What the template puts before the text of a demonstration."""
    parser: str | None = None
    """The renderer's setting that reads the calls which the template writes."""
    call: str = ""
    """How a model calls add(a=1, b=2), the end of its reply included."""
    but: dict[str, str] = field(default_factory=dict)
    """What of the matrix is `refused`, or right with something `warned` of."""

    @property
    def end_of_turn(self) -> str:
        return self.end or self.eos


# fmt: off
SHAPES = [
    Shape("chatml", "plain turns", "<|im_end|>"),
    Shape("chatml-without-system", "leaves system messages out", "<|im_end|>", but={"system": "refused"}),
    Shape("thinking-opened", "the prompt opens a thought, history is without", "<|im_end|>", added=THOUGHT,
          thinks="R</think>", but={"shown": "refused"}),
    Shape("alternating", "takes user and assistant in turn, nobody else", "</s>", special=("<s>", "</s>"),
          but={"system": "refused"}),
    Shape("smollm2", "has a system message of its own", "<|im_end|>"),
    Shape("smollm3", "a head of metadata; tools; calls are not in history", "<|im_end|>", added=THOUGHT + CALL,
          thinks="<think>R</think>", parser="qwen3", call=JSON_CALL, but={"tools": "warned"}),
    Shape("qwen2.5", "a system message of its own; tools", "<|im_end|>", ends=("<|im_end|>", "<|endoftext|>"),
          added=CALL, parser="qwen3", call=JSON_CALL),
    Shape("qwen3", "tools; thoughts since the last question stay, the last reply has an empty one", "<|im_end|>",
          ends=("<|im_end|>", "<|endoftext|>"), added=THOUGHT + CALL, thinks="<think>\nR\n</think>\n\n", shows=EMPTY,
          parser="qwen3", call=JSON_CALL),
    Shape("qwen3.5", "as qwen3; the prompt opens a thought; a user must speak; calls are tags", "<|im_end|>",
          ends=("<|im_end|>", "<|endoftext|>"), added=THOUGHT + CALL, thinks="R\n</think>\n\n",
          shows="\n</think>\n\n", parser="qwen3.5", call=f"R\n</think>\n\n{TAGS_CALL}<|im_end|>"),
    Shape("phi-3.5", "ends a turn with another mark than a text", "<|endoftext|>",
          special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
          ends=("<|end|>", "<|assistant|>", "<|endoftext|>"), end="<|end|>"),
    Shape("llama-3", "dates in a system turn; tools in the first question; trims", "<|eot_id|>",
          special=("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                   "<|eom_id|>", "<|eot_id|>"),
          bos="<|begin_of_text|>", ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
    Shape("gemma-3",
          "system message in the first question; the assistant is `model`; ends a turn with its own mark; takes turns",
          "<eos>", special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>",
          ends=("<eos>", "<end_of_turn>"), end="<end_of_turn>"),
    Shape("mistral", "no header of the assistant's; system message in the last question; takes turns; tools", "</s>",
          special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                   "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
          bos="<s>", shows=" "),
    Shape("deepseek-v3", "full-width marks; a bare system text; no tools", "<｜end▁of▁sentence｜>",
          special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
          bos="<｜begin▁of▁sentence｜>"),
    Shape("deepseek-r1", "as deepseek-v3; the prompt opens a thought, history is without", "<｜end▁of▁sentence｜>",
          special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
          bos="<｜begin▁of▁sentence｜>", added=THOUGHT, thinks="R\n</think>\n\n", but={"shown": "refused"}),
    Shape("glm-4.5", "a turn ends with the next one's mark; tools; thoughts since the last question stay",
          "<|endoftext|>",
          special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
          ends=("<|endoftext|>", "<|user|>", "<|observation|>"), end="<|user|>",
          added=(*THOUGHT, *CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
          thinks="\n<think>R</think>\n", parser="glm", call=f"\n<think>R</think>\n{KEYS_CALL}<|observation|>",
          but={"shown": "refused"}),
    Shape("gpt-oss", "a reply has channels and ends with another mark than in history", "<|return|>",
          special=("<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>",
                   "<|constrain|>"),
          ends=("<|return|>", "<|endoftext|>", "<|call|>"),
          but=dict.fromkeys(("single", "turns", "shown", "system"), "refused")),
]
"""Of the published models with these names, and of models that many have made."""
# fmt: on
TAUGHT = ("thinking-opened", "gemma-3")
"""Those that tests/e2e/test_templates.py trains a model with."""


def tiny_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """Bytes and the shape's marks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(list(shape.special))
    tokens.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in shape.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=shape.eos, bos_token=shape.bos, pad_token=shape.special[0]
    )
    tokenizer.chat_template = (TEMPLATES / f"{shape.name}.jinja").read_text()
    return tokenizer


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Two random layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def save(folder: Path, shape: Shape, tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> Path:
    """Write a model folder, with a generation_config.json that names the shape's ends."""
    ends = tokenizer.convert_tokens_to_ids(list(shape.ends or [shape.eos]))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def teach(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]], steps: int = 400
) -> None:
    """Have a model know replies to questions by heart; each reply is given with its end."""
    rows = []
    for question, reply in pairs:
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        rows.append([tokenizer.encode(text, add_special_tokens=False) for text in (prompt, reply)])
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for row, (prompt, reply) in enumerate(rows):
        ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def conversation(*, system: bool = False, turns: int = 1) -> list[dict[str, Any]]:
    """Messages U1, A1, U2, … up to a question."""
    opening = [{"role": "system", "content": "Be brief."}] if system else []
    earlier = [
        message
        for number in range(1, turns)
        for message in ({"role": "user", "content": f"U{number}"}, {"role": "assistant", "content": f"A{number}"})
    ]
    return [*opening, *earlier, {"role": "user", "content": f"U{turns}"}]
