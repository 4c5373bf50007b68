"""Tokenizers of other families than the models of prl: byte-level BPE with words, and BPE as SentencePiece has it."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
TEXT = [
    "The sum of 12 and 34 is 46.",
    "Reverse the text: hello, world",
    "the the there these 日本語 naïve café 🙂🙂",
] * 20


def byte_level(template="chatml", ends="<|im_end|>", normalizer=None):
    """Words of up to many bytes, each with the blank before it, as of Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    marks = ["<|im_start|>", "<|im_end|>", ends]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in dict.fromkeys(marks)])
    return finished(tokenizer, template, ends)


def sentence_piece(template="mistral", ends="</s>"):
    """Words with ▁ in front, also of a text's first word; bytes where it has no token. As of Llama 2 and Mistral."""
    blanks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = blanks
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trained.train_from_iterator(
        [line.encode("ascii", "ignore").decode() for line in TEXT],
        trainers.BpeTrainer(vocab_size=120, show_progress=False),
    )
    saved = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *saved["vocab"]]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [tuple(pair) for pair in saved["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = blanks
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<s>", "</s>")])
    return finished(tokenizer, template, ends)


def finished(tokenizer, template, ends):
    chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if ends == "</s>" else None,
        eos_token=ends,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
