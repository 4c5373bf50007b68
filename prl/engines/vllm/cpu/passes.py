"""A forward pass in fewer operations, with the same result bit by bit.

Most passes of a small model hold a few sequences, the last of a batch, and their time is that of calling operations.
vLLM runs eight of torch's for an RMS norm, behind two dispatchers of its own, and draws noise for the whole batch
before it draws that of the seeds. To be removed once `RMSNorm.forward_cpu` calls vLLM's kernel, which is there, and
`TopKTopPSampler.forward_cpu` draws once. Written for the version of vLLM in `worker.py`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def normalise_in_one_kernel() -> None:
    """Patch vLLM in this process and those that it forks: RMS norms in float32 run its own kernel."""
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
    """Patch vLLM in this process and those that it forks: noise of seeded requests comes from their seeds alone."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    forward = TopKTopPSampler.forward_cpu

    def forward_cpu(sampler: Any, logits: "Tensor", generators: dict[int, Any], k: Any, p: Any) -> Any:
        if len(generators) == len(logits):
            return sampler.forward_native(logits, generators, k, p)
        return forward(sampler, logits, generators, k, p)

    TopKTopPSampler.forward_cpu = forward_cpu
