"""The policy as a torch model: load it, run packed rows through it, write it out for the engine."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from prl.base.errors import ConfigError
from prl.base.files import write_tensors
from prl.config.model_folder import positions, sees, write_files
from prl.config.tensor_names import check_names
from prl.engines.rope import fix_rope
from prl.engines.tokenizers import load_tokenizer
from prl.rollouts.inputs import ModelInput, Picture
from prl.rollouts.messages import MicroBatch
from prl.trainer.architecture import check_architecture, has_sinks, language_of
from prl.trainer.batch import Stack, stacks
from prl.trainer.divergence import Head
from prl.trainer.logprobs import chunked_logprobs
from prl.trainer.sharding import as_forward
from prl.trainer.tree.attention import NAME, use_tree_attention, without
from prl.trainer.weights import on_writer, whole_tensors

CHECKED = 24
"""Tokens of a sequence of `check_layout`: in fewer, other frequencies change less than rounding of bfloat16 does."""


def load_model(
    path: str,
    *,
    device: torch.device,
    trust_remote_code: bool = False,
    ends: Iterable[int] | None = None,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """Load the causal language model at `path`, which may see pictures, with float32 master weights, in training mode.

    Args:
        path: a model folder, or a name on the hub.
        device: where its weights go; on the meta device it has shapes alone, for a rank that gets them from another.
        trust_remote_code: run the code in the model's folder.
        ends: tokens that end its turns; None = as its chat template and files say.
        max_model_len: tokens of the longest sequence; None = as many as the model has positions.

    Raises ValueError for a model that cannot be loaded, or that the trainer would get wrong.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    longest = max_model_len or positions(config.to_dict()) or 0
    check_architecture(config, path, longest)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name, value in part.to_dict().items():
            if name.endswith(("dropout", "pdrop", "jitter_noise")) and value:  # noise of experts' inputs
                setattr(part, name, 0.0)  # the sampler has none: with it every batch would be off-policy
    how = {
        "attn_implementation": NAME if has_sinks(config) else "sdpa",
        "dtype": torch.float32,
        "trust_remote_code": trust_remote_code,
    }
    if device.type == "meta":
        with device:
            model = class_of(config).from_config(config, **how)
    else:
        model = _with_weights(path, config, how)
        name_ends(model, ends_of(path, trust_remote_code) if ends is None else ends)
    fix_rope(model, longest)
    use_tree_attention(model)
    return model.to(device).train()


def class_of(config: Any) -> Any:
    """Return the class of transformers that makes the model of a config."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def _with_weights(path: str, config: Any, how: Mapping[str, Any]) -> PreTrainedModel:
    """Load a model with its weights, on the CPU. Raises ValueError for weights that are not there or do not fit."""
    try:
        model, loaded = class_of(config).from_pretrained(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, in one line
            **how,
        )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be loaded: {' '.join(str(error).split())[:1000]}") from error
    check_weights(path, model, loaded)
    check_names(model)
    return cast(PreTrainedModel, model)


def ends_of(path: str, trust_remote_code: bool) -> list[int]:
    """Return the tokens that end a turn by a model's chat template and files; none of a model without a tokenizer."""
    from prl.engines.renderer import make_renderer  # it takes seconds

    with contextlib.suppress(ConfigError):  # there is none, or the template needs the renderer of its family
        return make_renderer(load_tokenizer(path, "path", trust_remote_code), name="default").get_stop_token_ids()
    return []


def name_ends(model: PreTrainedModel, ends: Iterable[int]) -> None:
    """Have a model's generation config name these ends of turns, beside its own: other servers stop there as well."""
    named = model.generation_config.eos_token_id
    if not isinstance(named, list):
        named = [] if named is None else [named]
    rows = len(model.get_input_embeddings().weight)
    more = [token for token in dict.fromkeys(ends) if token not in named and token < rows]
    if more:
        model.generation_config.eos_token_id = [*named, *more]


def freeze(model: PreTrainedModel, parts: Iterable[str]) -> None:
    """Freeze the parameters that have one of these parts in their names, such as `visual`.

    Raises ConfigError for a part that no parameter has, or if nothing is left to train.
    """
    for part in parts:
        chosen = [weight for name, weight in model.named_parameters() if f".{part}." in f".{name}."]
        if not chosen:
            known = ", ".join(name for name, module in model.base_model.named_children() if list(module.parameters()))
            raise ConfigError(f"model.freeze: no parameter has {part!r} in its name; this model has {known}")
        for weight in chosen:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ConfigError(f"model.freeze={list(parts)} leaves no parameter to train")


def check_weights(path: str, model: PreTrainedModel, loaded: Mapping[str, Any]) -> None:
    """Raise ValueError for weights that do not fit the model, by what transformers says of its loading."""
    for name, shape, wanted in sorted(loaded["mismatched_keys"]):
        raise ValueError(f"{path}: {name} has shape {list(shape)} in its weights and {list(wanted)} by its config.json")
    missing = sorted(loaded["missing_keys"])
    if missing:  # transformers would have made them up
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{path} has no weights for {missing[0]}{others}")
    for layer in further_layers(model, loaded["unexpected_keys"]):  # transformers would have left it out
        raise ValueError(f"{path} has weights of {layer}, a layer beyond those of its config.json")


def further_layers(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Return layers with the tensors of the model's own, among names of weights that it has no place for.

    One that has others too, such as one that predicts a second token, may be left out.
    """
    numbered = re.compile(r"(.*?\.\d+)(\..+)")
    own = {found[2] for found in map(numbered.fullmatch, model.state_dict()) if found is not None}
    layers = defaultdict[str, list[bool]](list)
    for name in unexpected:
        found = numbered.fullmatch(name)
        if found is not None:
            layers[found[1]].append(found[2] in own)
    return [layer for layer, known in layers.items() if all(known)]


def stack_logprobs(
    model: PreTrainedModel, stack: Stack, *, head_chunk: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropy of `run_stack`, without a look at the head."""
    logprobs, entropy, _ = run_stack(model, stack, head_chunk=head_chunk)
    return logprobs, entropy


@as_forward
def run_stack(
    model: PreTrainedModel, stack: Stack, *, head_chunk: int | None, on_head: Callable[[Head], Any] = lambda head: None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Compute the logprob of each wanted token given the tokens before it in its sequence, and the entropy there.

    Args:
        model: the policy.
        stack: in packed rows, its positions restart at 0 where a sequence starts, which is how transformers keeps the
            sequences of a row from attending to each other. The first token of a sequence gets no logprob.
        head_chunk: tokens whose logits exist at one time; None = as `chunked_logprobs` chooses.
        on_head: called with the head and the hidden states before it, `[flattened rows, dim]`, while they are whole.

    Returns:
        Two `[flat tokens]` tensors, at least float32, 0.0 outside `wanted`, both with gradient; what `on_head` returns.
    """
    # use_cache=False matters: with a cache object transformers builds a plain causal mask across packed sequences.
    inputs: dict[str, Any] = {"input_ids": stack.input_ids, "position_ids": stack.position_ids, "use_cache": False}
    if stack.tree is not None:  # four dimensions = a finished mask, so that transformers builds none
        inputs |= {"tree": stack.tree, "attention_mask": torch.ones(1, 1, 1, 1, device=stack.input_ids.device)}
    elif has_sinks(model.config):  # its masks do not get positions; of embeddings they take shape and place
        embedded, positions = stack.input_ids[..., None], stack.position_ids
        inputs["attention_mask"] = create_masks_for_generate(model.config, embedded, None, None, positions)
    body = model.base_model
    if sees(model.config):
        from prl.trainer.vision import with_pictures  # a run with text needs none of it

        body, inputs = language_of(model), with_pictures(model, stack, inputs)
    # Counted before the model runs: on a GPU each count waits for all that was launched.
    known = (stack.wanted & (stack.before >= 0)).nonzero().squeeze(1)
    # Rollouts of a group often say the same: the head computes a token after the same tokens once.
    some, same = distinct(stack.before[known], stack.token_ids[known], stack.temperatures[known])
    place = known[some]
    hidden = body(**inputs).last_hidden_state.flatten(0, 1)
    head = model.get_output_embeddings()
    of_distinct = chunked_logprobs(
        hidden.index_select(0, stack.before[place]),
        head.weight,
        stack.token_ids[place],
        stack.temperatures[place],
        chunk=head_chunk,
        bias=getattr(head, "bias", None),
        into_grad=True,
    )
    logprobs, entropy = (
        values.new_zeros(len(stack.token_ids)).index_put((known,), values.index_select(0, same))
        for values in of_distinct
    )
    return logprobs, entropy, on_head(Head(hidden, head.weight, getattr(head, "bias", None)))


def distinct(*columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the different rows of a table.

    Args:
        columns: the columns of the table, each `[rows]`.

    Returns:
        The place of one of each kind, `[different rows]`; and the number of each row's kind, `[rows]`.
    """
    like = torch.zeros(len(columns[0]), dtype=torch.int64, device=columns[0].device)
    for column in columns:
        values, kind = column.unique(return_inverse=True)
        _, like = (like * len(values) + kind).unique(return_inverse=True)
    one = like.new_empty(int(like.max()) + 1 if len(like) else 0)
    one[like] = torch.arange(len(like), device=like.device)
    return one, like


@torch.no_grad()
def check_layout(
    model: PreTrainedModel,
    layout: Callable[..., Iterator[Stack]],
    device: torch.device | None = None,
    tolerance: float = 1e-2,
    max_model_len: int | None = None,
) -> None:
    """Raise ValueError unless two sequences with a common prefix get the logprobs that they get alone.

    They are looked at in one packed row, since some architectures ignore positions, and in `layout`. The packed row
    ends with the last positions of a longest sequence, by which some models choose the frequencies of all positions.
    Of a model that sees, both have a picture in their prefix, and different ones behind it.

    A fault shows with nearly any tokens. But in bfloat16 rounding may choose other experts for a few tokens, which
    changes their logprobs by as much. So a model is refused if it fails for two draws of three.

    Args:
        model: the policy.
        layout: makes stacks of rows.
        device: where the model runs; None = where its weights are.
        tolerance: largest difference of logprobs that passes, nats.
        max_model_len: tokens of the longest sequence; None = as many as the model has positions.
    """
    longest = max_model_len or positions(model.config.to_dict()) or CHECKED
    device = model.device if device is None else device
    faults = list[str]()
    for seed in range(3):  # on all ranks alike: they come to the same result
        fault = _fault_of_layout(model, layout, device, tolerance, seed, longest)
        if fault is not None:
            faults.append(fault)
        if len(faults) != 1:
            break
    if len(faults) > 1:
        raise ValueError(f"{type(model).__name__}{faults[-1]}")


def _fault_of_layout(
    model: PreTrainedModel,
    layout: Callable[..., Iterator[Stack]],
    device: torch.device,
    tolerance: float,
    seed: int,
    longest: int,
) -> str | None:
    """Compare the logprobs of two sequences by themselves and together. Returns the fault, None if there is none."""
    vocabulary = len(model.get_output_embeddings().weight)
    ids = torch.randint(vocabulary, (2 * CHECKED - 4,), generator=torch.Generator().manual_seed(seed)).tolist()
    one, two, start = ModelInput(ids[:CHECKED]), ModelInput(ids[:4] + ids[CHECKED:]), ModelInput(ids[:4])
    features: Mapping[str, Any] = {}
    pictures: dict[str, torch.Tensor] = {}
    if sees(model.config):
        from prl.trainer.vision import made_up_pictures, plain_inputs

        one, two, features = made_up_pictures(model.config, one, two)
        pictures = plain_inputs(model.base_model, one, features, device)

    def logprobs(of: Callable[..., Iterator[Stack]], *rows: MicroBatch) -> torch.Tensor:
        """Return those of all text but the first four tokens of each sequence, in the order of the sequences, flat."""
        (stack,) = of(rows, 4 * len(two), device)
        stack = replace(stack, features=features)
        by_sequence = stack_logprobs(model, stack, head_chunk=64)[0][stack.mask].unflatten(0, (-1, CHECKED - 4))
        order = sorted(range(len(by_sequence)), key=stack.origins.__getitem__)
        return by_sequence[order].flatten()

    alone = torch.cat([logprobs(stacks, _row(one)), logprobs(stacks, _row(two))])
    if not alone.isfinite().all():
        return ": its logprobs are not finite, as where weights are NaN or infinite"
    beside = _row(one, two, start)
    beside.position_ids[-4:] = range(max(4, longest) - 4, max(4, longest))  # the end of a longest sequence
    gap = (logprobs(stacks, beside) - alone).abs().max().item()
    if not gap < tolerance:
        return (
            f": packed sequences see each other (logprobs off by {gap:.2g}): this architecture ignores positions, or "
            f"chooses frequencies by the longest sequence (here {longest} tokens; try a lower model.max_model_len)"
        )
    tokens = torch.tensor([one.token_ids], device=device)
    trained = torch.tensor(_row(one).mask[1:], device=device)
    logits = model(input_ids=tokens, use_cache=False, **pictures).logits[0, :-1][trained]
    expected = logits.float().log_softmax(-1).gather(1, tokens[0, 1:][trained][:, None])
    if not (alone[: CHECKED - 4] - expected.squeeze(1)).abs().max().item() < tolerance:
        return " changes its logits after the head, which the trainer does not do"
    gap = (logprobs(layout, _row(one), _row(two)) - alone).abs().max().item()
    if not gap < tolerance:
        return f": a shared prefix changes logprobs by {gap:.2g}; set {without(device)}"
    return None


def _row(*sequences: ModelInput) -> MicroBatch:
    """Make a packed row of sequences that trains all text but the first four tokens of each."""
    places, mask, pictures = list[int](), list[bool](), list[Picture]()
    for sequence in sequences:
        pictures += [picture.moved(len(places)) for picture in sequence.pictures]
        places += range(len(sequence))
        text = [key >= 0 for key in sequence.keys]
        mask += [on and place > 4 for on, place in zip(text, accumulate(text), strict=True)]
    return MicroBatch(
        input_ids=[token for sequence in sequences for token in sequence.token_ids],
        mask=mask,
        logprobs=[0.0] * len(places),
        temperatures=[1.0] * len(places),
        position_ids=places,
        sequence_lengths=list(map(len, sequences)),
        env_names=[""] * len(sequences),
        losses=[""] * len(sequences),
        pictures=pictures,
    )


def token_text(model_config: Mapping[str, Any]) -> Callable[[int], str]:
    """Return a function from a token id of the policy to its text; "" for an id that its tokenizer does not have."""
    tokenizer = AutoTokenizer.from_pretrained(model_config["path"], trust_remote_code=model_config["trust_remote_code"])
    return lambda token: tokenizer.decode([token]) if token < len(tokenizer) else ""


def save_weights(
    model: PreTrainedModel, folder: Path | None, dtype: torch.dtype, files: Mapping[str, bytes] | None = None
) -> None:
    """Write a Hugging Face model folder; a tied head is left out, adapters are merged.

    Of a model that is spread over ranks, all must call it: those with None as their folder send what they have.

    Args:
        model: the policy.
        folder: the folder to write; None on the ranks that do not write.
        dtype: number format of the weights in the file.
        files: as in `write_model`.
    """
    tensors = on_writer(whole_tensors(model, dtype), writes=folder is not None)
    if folder is not None:
        write_model(folder, model, tensors, files or {})


def write_model(
    folder: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor], files: Mapping[str, bytes]
) -> None:
    """Write a Hugging Face model folder.

    Args:
        folder: the folder to write.
        model: the policy, whose configs are written.
        tensors: the weights by their names in files.
        files: further files by path, such as `companion_files` or a tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    write_files(files, folder)  # before the config, of which it may have the one that the model was loaded with
    model.config.save_pretrained(folder)
    # The tokens that end a turn, among others. Its own `save_pretrained` would check temperatures.
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string(), encoding="utf-8")
