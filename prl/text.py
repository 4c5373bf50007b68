"""Text that can be stored and tokenized."""


def encodable(text: str) -> str:
    """Replace unpaired surrogates by `?`: JSON can spell them, but no UTF-8 file and no tokenizer accepts them."""
    return text.encode("utf-8", "replace").decode()
