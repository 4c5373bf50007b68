"""What prl changes in vLLM's forward pass on a CPU: less of it, with the same result.

Written for the version of vLLM in `worker.py`, and like there vLLM is imported inside the functions. A process
that has begun to serve hands the changes on to those that it forks.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from prl.inference.prompts import Distinct

SOURCE = "prl_source"
"""Our key in the forward context: for each token of the batch, which of those that run it is."""
PER_TOKEN = ("input_ids", "positions")
"""What a model is given that takes nothing but tokens."""


def run_prefixes_once() -> None:
    """Have a CPU engine run what sequences of a forward pass share from their start once.

    That is a prompt, for all continuations of it that begin in the same pass, or run anew after an update of the
    weights. vLLM's prefix cache shares whole blocks only, which have 32 tokens or more on a CPU.
    """
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    forward, write = CPUModelRunner._model_forward, CPUAttentionBackendImpl.do_kv_cache_update

    def run(runner: "CPUModelRunner", **inputs: Any) -> Any:
        context = get_forward_context()
        found = distinct_sequences(runner, inputs, context.attn_metadata)
        if found is None:
            return forward(runner, **inputs)
        tokens, source, whole = torch.from_numpy(found.tokens), torch.from_numpy(found.source), context.attn_metadata
        context.attn_metadata = metadata_of(runner, whole, found)
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


def normalise_in_one_kernel() -> None:
    """Have a CPU engine's RMS norms run vLLM's own kernel in float32, with the same result bit by bit.

    vLLM runs eight operations of torch and two dispatchers of its own there, a tenth of the time of a small model.
    """
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    def forward_cpu(norm: Any, x: "Tensor", residual: "Tensor | None" = None) -> Any:
        plain = norm.has_weight and norm.variance_size_override is None and norm.weight.dtype == torch.float32
        if not plain or x.dtype != torch.float32 or (residual is not None and not x.is_contiguous()):
            return norm.forward_native(x, residual)
        if residual is not None:
            torch.ops._C.fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
            return x, residual
        out = torch.empty(x.shape)
        torch.ops._C.rms_norm(out, x.contiguous(), norm.weight, norm.variance_epsilon)
        return out

    RMSNorm.forward_cpu = forward_cpu


def draw_noise_once() -> None:
    """Have a CPU engine's sampler draw noise for seeded requests from their own generators alone.

    vLLM draws some for the whole batch first, and then overwrites it where a request has a seed: nearly half of what
    sampling costs where all have one.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    forward = TopKTopPSampler.forward_cpu

    def forward_cpu(sampler: Any, logits: "Tensor", generators: dict[int, Any], k: Any, p: Any) -> Any:
        draw = sampler.forward_native if len(generators) == len(logits) else partial(forward, sampler)
        return draw(logits, generators, k, p)

    TopKTopPSampler.forward_cpu = forward_cpu


def distinct_sequences(runner: "CPUModelRunner", inputs: dict[str, Any], attention: Any) -> "Distinct | None":
    """What is left of a forward pass; None where little repeats, or more than tokens goes in."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    from prl.inference.prompts import distinct

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


def metadata_of(runner: "CPUModelRunner", attention: Any, left: "Distinct") -> dict[str, Any]:
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
