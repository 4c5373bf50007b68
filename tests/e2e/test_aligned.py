"""Distillation from a teacher with another tokenizer, which the text of replies aligns."""

import math

import pytest
import torch
from other_tokenizers import byte_level

pytestmark = pytest.mark.slow


@pytest.fixture
def other_family(tmp_path):
    """The folder of a random model with another tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes a second, of each process that collects tests

    folder = tmp_path / "other"
    tokenizer = byte_level()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)
    ).save_pretrained(folder)
    return folder


def test_a_teacher_of_another_family_scores_by_text(inline, other_family):
    given = ("debug=fast", "algo=opd", "env=reverse_text", "max_steps=2", f"teacher.model.path={other_family}")
    refused = inline(*given, name="refused")
    assert refused.status == 2 and "algo.align=text" in refused.stderr
    run = inline(*given, "algo.align=text")
    assert run.status == 0, run.stderr
    shares, k = run.column("log/reverse_text/spans_of_one"), run.column("ref_kl")
    assert all(0 < share < 1 for share in shares) and len(k) == 2
    assert all(math.isfinite(value) and value < -1 for value in k), "a random teacher thinks little of the replies"
