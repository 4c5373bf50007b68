"""The policy as a torch model: load it, run packed rows through it, write it out for the engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from prl.trainer.batch import Stack, shared_stacks, stacks
from prl.trainer.logprobs import chunked_logprobs
from prl.wire.files import announce, checkpoint_path
from prl.wire.messages import MicroBatch


def load_model(path: str, *, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model at `path` with float32 master weights, in training mode."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    # Transformed after the head: `token_logprobs` applies the head itself and would miss that.
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{path}: its config sets {name}, a change to the logits that the trainer does not apply")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            raise ValueError(
                f"{path}: a mixture of experts ({name}={getattr(config, name)}); the engine does not take new expert "
                "weights while it runs, so it would go on sampling with old ones"
            )
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop")) and value:
            setattr(config, name, 0.0)  # the sampler has none: with dropout every batch would be off-policy
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    return model.to(device).train()


def token_logprobs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    temperatures: torch.Tensor,
    select: torch.Tensor,
    *,
    head_chunk: int,
    previous: torch.Tensor | None = None,
    attention: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each selected token given the tokens before it in its sequence, and the entropy there.

    Args:
        input_ids, position_ids, temperatures: `[rows, tokens]`; positions restart at 0 where a sequence starts, which
            is how transformers keeps sequences of a row from attending to each other.
        select: bool `[rows, tokens]`; only these tokens get a logprob. The first token of a sequence never does.
        head_chunk: tokens whose logits exist at one time.
        previous, attention: as in `Stack`.

    Returns:
        Two float32 `[rows, tokens]` tensors, 0.0 outside `select`; the second carries no gradient.
    """
    # use_cache=False matters: with a cache object transformers builds a plain causal mask across packed sequences.
    hidden = model.base_model(
        input_ids=input_ids, position_ids=position_ids, attention_mask=attention, use_cache=False
    ).last_hidden_state
    select = select & (position_ids > 0)
    head = model.get_output_embeddings()
    flat = select.flatten().nonzero().squeeze(1)
    before = flat - 1 if previous is None else previous.flatten()[flat]
    picked, entropy = chunked_logprobs(
        hidden.flatten(0, 1)[before],
        head.weight,
        input_ids.flatten()[flat],
        temperatures.flatten()[flat],
        chunk=head_chunk,
        bias=getattr(head, "bias", None),
    )
    zeros = torch.zeros(select.numel(), dtype=torch.float32, device=select.device)
    return zeros.index_put((flat,), picked).view_as(select), zeros.index_put((flat,), entropy).view_as(select)


def stack_logprobs(model: PreTrainedModel, stack: Stack, *, head_chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of the wanted tokens of a stack."""
    return token_logprobs(
        model,
        stack.input_ids,
        stack.position_ids,
        stack.temperatures,
        stack.wanted,
        head_chunk=head_chunk,
        previous=stack.previous,
        attention=stack.attention,
    )


def random_tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Seeded tokens of the model's vocabulary, for a look at what it does with them, int64 `[count]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(len(model.get_output_embeddings().weight), (count,), generator=generator).to(model.device)


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Raise unless two sequences in one row get the logprobs they get alone; some architectures ignore positions."""
    ids = random_tokens(model, 12)[None]
    positions = torch.tensor([[*range(5), *range(7)]], device=model.device)

    def logprobs(part: slice) -> torch.Tensor:
        ones = torch.ones_like(ids[:, part])
        return token_logprobs(model, ids[:, part], positions[:, part], ones.float(), ones.bool(), head_chunk=64)[0]

    packed, first, second = map(logprobs, (slice(12), slice(5), slice(5, 12)))
    logits = model(input_ids=ids[:, :5], use_cache=False).logits[:, :-1]
    expected = logits.float().log_softmax(-1).gather(2, ids[:, 1:5, None]).squeeze(2)
    gap = (packed - torch.cat([first, second], dim=1)).abs().max().item()
    if not gap < 1e-2:
        raise ValueError(
            f"{type(model).__name__}: packed sequences see each other (logprobs off by {gap:.2g}); "
            "this architecture ignores position_ids and cannot be trained on packed rows"
        )
    if not (first[:, 1:] - expected).abs().max().item() < 1e-2:
        raise ValueError(f"{type(model).__name__} changes its logits after the head, which the trainer does not do")


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether one explicit mask is right for all layers of this model."""
    layer_types = getattr(model.config, "layer_types", None) or ["full_attention"]
    return set(layer_types) == {"full_attention"} and not getattr(model.config, "sliding_window", None)


@torch.no_grad()
def check_sharing(model: PreTrainedModel) -> None:
    """Raise unless two sequences with a common prompt get the logprobs they get as packed rows."""
    ids = random_tokens(model, 12).tolist()
    rows = [
        MicroBatch(
            input_ids=tokens,
            mask=[False] * 4 + [True] * 4,
            logprobs=[0.0] * 8,
            temperatures=[1.0] * 8,
            position_ids=list(range(8)),
            sequence_lengths=[8],
            env_names=[""],
            losses=[""],
        )
        for tokens in (ids[:8], ids[:4] + ids[8:])
    ]
    found = []
    for layout in (stacks, shared_stacks):
        (stack,) = layout(rows, 64, model.device)
        logprobs, _ = stack_logprobs(model, stack, head_chunk=64)
        found.append(sorted(logprobs[stack.wanted].tolist()))
    gap = max(abs(a - b) for a, b in zip(*found, strict=True))
    if not gap < 1e-2:
        raise ValueError(
            f"{type(model).__name__}: a shared prompt changes logprobs by {gap:.2g}; set trainer.share_prompts=false"
        )


def save_weights(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` in Hugging Face names; a tied head is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    save_file(
        {name: value.detach().to("cpu", dtype).contiguous() for name, value in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    model.config.save_pretrained(folder)


def write_checkpoint(run_dir: Path, step: int, model: PreTrainedModel, model_config: Mapping[str, Any]) -> None:
    """Write the float32 weights of `step`, the tokenizer and the generation config, as a whole or not at all.

    Args:
        run_dir: the run directory; the folder is `checkpoints/step_<step>` in it.
        step: the last step that the weights were trained in, 0 for the base model.
        model: the policy.
        model_config: the `model` node of the config, whose `path` has the tokenizer.
    """
    final = checkpoint_path(run_dir, step)
    folder = final.with_name(f".{final.name}")
    save_weights(model, folder, torch.float32)
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string())  # end-of-turn tokens
    tokenizer = AutoTokenizer.from_pretrained(model_config["path"], trust_remote_code=model_config["trust_remote_code"])
    tokenizer.save_pretrained(folder)
    announce(folder, final)
