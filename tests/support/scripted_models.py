"""Models that say the texts that they are given."""

from prl.engines.scripted import Scripted


def token_ids(tokenizer, text):
    """The tokens of a whole reply."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.convert_tokens_to_ids("<|im_end|>")]


def saying(tokenizer, *texts, version=0):
    """The policy at a version, which says the texts one after the other."""
    model = Scripted([token_ids(tokenizer, text) for text in texts])
    model.version = version
    return model
