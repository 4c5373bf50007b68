"""Prefixes that sequences of one forward pass share are run once, with the same result bit by bit.

That is a prompt, for all continuations of it that begin in the same pass, or run anew after an update of the weights.
vLLM's prefix cache shares whole blocks only, which have 32 tokens or more on a CPU, and none between the sequences of
one pass. Sampling a default step (64 prompts of `math`, 4 replies each) takes 150 ms of a core with this and 256
without. To be removed once vLLM shares a prompt among the `n` continuations of one request in the pass that computes
it. Written for the version of vLLM in `worker.py`, which is imported inside the functions.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

SOURCE = "prl_source"
"""Our key in the forward context: for each token of the batch, which of those that run it is."""
PER_TOKEN = ("input_ids", "positions")
"""Inputs of a model that takes nothing but tokens."""
SAVED = 0.1
"""Least share of the tokens of a pass that is worth leaving out: to leave tokens out takes time, too."""


@dataclass(frozen=True, slots=True)
class Distinct:
    """A packed batch without tokens whose sequence, up to them, another one has as well."""

    rows: NDArray[np.int64]
    """[sequences left] Their rows in the batch. Of each the last tokens are left, those from some token on."""
    starts: NDArray[np.int32]
    """[sequences left + 1] Where each begins in `tokens`, and their end."""
    tokens: NDArray[np.int64]
    """[tokens left] Where their tokens are in the batch."""
    source: NDArray[np.int64]
    """[tokens of the batch] For each, its place in `tokens`, or that of the token which it repeats."""


def distinct(
    token_ids: NDArray[np.integer],
    starts: NDArray[np.integer],
    seq_lens: NDArray[np.integer],
    tables: Sequence[tuple[NDArray[np.integer], int]],
) -> Distinct | None:
    """A packed batch with what its sequences share from their start left in once; None where that saves too little.

    A token repeats another if both end the same tokens after the same blocks of the key-value cache.

    Args:
        token_ids: [tokens] What runs now, one sequence after the other.
        starts: [sequences + 1] Where each sequence begins in `token_ids`, and their end.
        seq_lens: [sequences] Tokens of each with those that the cache holds already.
        tables: For each group of layers, the blocks of the cache `[sequences, blocks]`, and the tokens in a block.
    """
    new_lens = np.diff(starts)
    alike = defaultdict[object, list[tuple[bytes, int]]](list)
    ids = token_ids.astype(">i8")  # so that sequences in the order of their bytes are in that of their tokens
    for row in np.flatnonzero(new_lens > 1).tolist():
        cached = int(seq_lens[row] - new_lens[row])
        blocks = (table[row, : -(-cached // size)].tobytes() for table, size in tables)
        alike[cached, *blocks].append((ids[starts[row] : starts[row + 1]].tobytes(), row))
    skipped = np.zeros(len(new_lens), np.int64)
    repeats: list[tuple[int, int]] = []
    for sequences in alike.values():
        sequences.sort()  # neighbours share the most
        for (_, earlier), (_, row) in itertools.pairwise(sequences):
            length = min(new_lens[earlier], new_lens[row])
            differ = np.flatnonzero(ids[starts[earlier] :][:length] != ids[starts[row] :][:length])
            if shared := differ[0] if len(differ) else length:
                skipped[row] = shared
                repeats.append((row, earlier))
    if skipped.sum() <= SAVED * len(token_ids):
        return None
    left = np.arange(len(token_ids)) >= np.repeat(starts[:-1] + skipped, new_lens)
    source = np.cumsum(left) - 1
    for row, earlier in repeats:  # the earlier one has been given its own before
        shared = int(skipped[row])
        source[starts[row] : starts[row] + shared] = source[starts[earlier] : starts[earlier] + shared]
    lens = new_lens - skipped
    rows = np.flatnonzero(lens)
    return Distinct(rows, np.concatenate([[0], np.cumsum(lens[rows])]).astype(np.int32), np.flatnonzero(left), source)


def run_prefixes_once() -> None:
    """Patch vLLM in this process and those that it forks."""
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    forward, write = CPUModelRunner._model_forward, CPUAttentionBackendImpl.do_kv_cache_update

    def run(runner: "CPUModelRunner", **inputs: Any) -> Any:
        context = get_forward_context()
        result = distinct_sequences(runner, inputs, context.attn_metadata)
        if result is None:
            return forward(runner, **inputs)
        tokens, source, whole = torch.from_numpy(result.tokens), torch.from_numpy(result.source), context.attn_metadata
        context.attn_metadata = metadata_of(runner, whole, result)
        context.additional_kwargs[SOURCE] = source
        try:
            inputs |= {name: inputs[name][tokens] for name in PER_TOKEN}
            return forward(runner, **inputs).index_select(0, source)
        finally:
            context.attn_metadata = whole
            del context.additional_kwargs[SOURCE]

    def write_all(impl: Any, layer: Any, key: "Tensor", value: "Tensor", *places: Any) -> None:
        if (source := get_forward_context().additional_kwargs.get(SOURCE)) is not None:
            key, value = key.index_select(0, source), value.index_select(0, source)  # many times as fast as [source]
        write(impl, layer, key, value, *places)

    CPUModelRunner._model_forward = run
    CPUAttentionBackendImpl.do_kv_cache_update = write_all


def distinct_sequences(runner: "CPUModelRunner", inputs: dict[str, Any], attention: Any) -> Distinct | None:
    """Return what is left of a forward pass; None where little repeats, or more than tokens goes in."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    given = {name: value for name, value in inputs.items() if value is not None}
    if given.keys() != set(PER_TOKEN) or not isinstance(attention, dict) or runner.lora_config is not None:
        return None
    groups = [group for groups in runner.attn_groups for group in groups]
    each = [m for group in groups if type(m := attention[group.layer_names[0]]) is CPUAttentionMetadata]
    tokens, positions = (given[name] for name in PER_TOKEN)
    plain = all(m.causal is True and m.num_actual_tokens == len(tokens) for m in each) and positions.dim() == 1
    if not each or len(each) < len(groups) or not plain or each[0].max_query_len < 2:
        return None
    tables = [(m.block_table.numpy(), group.kv_cache_spec.block_size) for m, group in zip(each, groups, strict=True)]
    return distinct(tokens.numpy(), each[0].query_start_loc.numpy(), each[0].seq_lens.numpy(), tables)


def metadata_of(runner: "CPUModelRunner", attention: Any, left: Distinct) -> dict[str, Any]:
    """The metadata that attention layers get for what is left of a batch."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    made = dict[str, Any]()
    rows, starts = torch.from_numpy(left.rows), torch.from_numpy(left.starts)
    for group in (group for groups in runner.attn_groups for group in groups):
        whole = attention[group.layer_names[0]]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=whole.seq_lens[rows],
            num_reqs=len(rows),
            num_actual_tokens=len(left.tokens),
            max_query_len=int(starts.diff().max()),
            max_seq_len=whole.max_seq_len,
            block_table_tensor=whole.block_table[rows],
            slot_mapping=whole.slot_mapping,  # of the whole batch, like the keys and values that are written
        )
        made |= dict.fromkeys(group.layer_names, group.get_metadata_builder().build(0, common))
    return made
