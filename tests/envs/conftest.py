"""What conversations are rendered with."""

import pytest

from prl.models import model_path
from prl.rollouts.renderer import make_renderer


@pytest.fixture(scope="session")
def renderer():
    from transformers import AutoTokenizer

    return make_renderer(AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True), "qwen3", {})
