"""The estimate of a trainer's memory against the peak of a real step, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prl.config.build import plain
from prl.config.hardware import MIB
from prl.config.lora import LoraConfig
from prl.config.schema import PolicyModelConfig
from prl.dry_run.memory import Pass, trainer_memory
from prl.dry_run.plan import TRAINER
from prl.dry_run.shape import optimiser_bytes, shape_of, with_adapters
from prl.launch.local import trainer_environment
from prl.trainer.config import AdamWConfig

WIDE = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
DEEP = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 64}
IMPORTED = 265 * MIB
"""What a trainer's process holds before it loads a model, which `peak.py` leaves out."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "millions", "length", "knobs", "lora"),
    [
        ("llama", WIDE, 9, 512, {"tokens_per_forward": 2048}, None),
        ("qwen3", DEEP, 6, 256, {"tokens_per_forward": 1024, "gradient_checkpointing": "selective"}, None),
        ("llama", WIDE, 9, 512, {"tokens_per_forward": 2048}, LoraConfig(rank=16)),
        ("qwen3_moe", WIDE | {"moe_intermediate_size": 256}, 24, 512, {"tokens_per_forward": 2048}, None),
    ],
    ids=["wide", "selective", "adapters", "experts"],
)
def test_the_peak_of_a_step(bare, built, kind, sizes, millions, length, knobs, lora):
    folder = bare(kind, **sizes)
    config = PolicyModelConfig(path=str(folder), lora=lora or LoraConfig())
    shape, model = shape_of(config, "model.path", trained=True)
    shape = shape if lora is None else with_adapters(shape, model, config)
    assert shape.parameters / 1e6 == pytest.approx(millions, rel=0.1)
    built(kind, **sizes).save_pretrained(folder)
    how = Pass(
        budget=knobs["tokens_per_forward"],
        length=length,
        row=length,
        checkpointing=knobs.get("gradient_checkpointing", "none"),
        trees=knobs.get("share_prefixes", True),
    )
    parts = trainer_memory(shape, how, optimiser=optimiser_bytes(model, AdamWConfig()))
    case = {"folder": str(folder), "length": length, "vocabulary": shape.vocabulary, "knobs": knobs}
    case["lora"] = None if lora is None else plain(lora)
    env = os.environ | trainer_environment(config, 1) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    here = Path(__file__).with_name("peak.py")
    done = subprocess.run([sys.executable, here, json.dumps(case)], env=env, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    estimate = sum(parts.values()) + TRAINER - IMPORTED
    print(f"{estimate / MIB:.0f} MiB for {measured / MIB:.0f}, {estimate / measured:.3f}")
    # What the C library keeps of freed blocks is not counted: a sixth where layers are recomputed in part.
    assert estimate == pytest.approx(measured, rel=0.2)
