"""Plain torch and peft in float64, and the data of the official SDK: what the server's answers are held against."""

import random
from pathlib import Path

import peft
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.models import model_path


def folder_of(client, path):
    """The folder of a checkpoint, by its URI."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    return Path(client.folder) / "models" / model.replace(":", "-") / kind / name


def adapter_of(client, model, name):
    """The folder of the adapter of a model as it is."""
    return folder_of(client, model.save_weights_for_sampler(name).result().path) / "adapter"


def plain(folder):
    """The base with the adapter of a folder, by peft."""
    base = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float64)
    return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True).double()


def target_logprobs(model, tokens, targets):
    """The logprobs of targets, of one or several in a position."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    targets = torch.as_tensor(targets)
    return logits.gather(1, targets.view(len(tokens), -1)).view(targets.shape)


def sequence(length, seed=0):
    """Tokens of some sums, and those that they predict: of random ones the logits are larger than float32 likes."""
    draw = random.Random(seed)
    sums = " ".join(f"{draw.randrange(50)}+{draw.randrange(50)}={draw.randrange(99)}" for _ in range(length))
    ids = AutoTokenizer.from_pretrained(model_path("tiny")).encode(sums)[: length + 1]
    return ids[:-1], ids[1:]


def datum(tokens, targets, **inputs):
    """A datum of the SDK."""
    inputs = {"target_tokens": torch.as_tensor(targets)} | {name: value.float() for name, value in inputs.items()}
    given = {name: types.TensorData.from_torch(value) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=given)


def text(length, seed=0):
    """A datum for cross_entropy."""
    return datum(*sequence(length, seed), weights=torch.ones(length))


def logprobs_of(result):
    """The logprobs that a pass gave, of each datum."""
    return [output["logprobs"].to_torch() for output in result.loss_fn_outputs]
