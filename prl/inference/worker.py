"""What vLLM's worker does with new policy weights. Written for vLLM 0.31.0, which is imported inside the functions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prl.inference.weights import files_of, tensors_of

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.worker.gpu_worker import Worker

VERSION = "0.31.0"


class PolicyWorker:
    """Worker extension, mixed into vLLM's worker: loads new policy weights into the running engine."""

    halfway = False
    """Whether a load has begun and not ended: another would take what that one has left for its own."""

    def load_policy(self, path: str) -> None:
        """Load the safetensors folder `path`. Weights are neither the old nor the new ones if it raises."""
        from vllm.platforms import current_platform

        if self.halfway:
            raise RuntimeError("an earlier load failed half-way: start the engine again")
        worker, on_cpu = cast("Worker", self), current_platform.is_cpu()
        model = worker.model_runner.get_model()
        self.halfway = True
        if on_cpu:
            forget_packed_experts(model)
        worker.reload_weights(weights_path=path)
        if type(model).__name__ == "GptOssForCausalLM":
            load_experts_and_sinks(model, path)
        if on_cpu:
            pack_output_heads(model)
            renew_sinks(model)
        self.halfway = False


# On a CPU vLLM makes copies of some weights, and its reload leaves these as they are. `tests/inference/test_worker.py`
# and `tests/e2e/test_engine.py` have models of each kind.


def forget_packed_experts(model: "nn.Module") -> None:
    """Have experts packed when weights have been loaded, as they were the first time; until then none can run."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if type(method) is UnquantizedFusedMoEMethod:
            method.moe_kernel = None


def load_experts_and_sinks(model: "nn.Module", path: str) -> None:
    """Load what a gpt_oss copies into place without a weight loader, which vLLM's reload leaves as it was.

    To go once vLLM's `gpt_oss.py` loads them by the parameters' loaders.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    methods: list[tuple[nn.Module, Any]] = [(layer, getattr(layer, "quant_method", None)) for layer in model.modules()]
    experts = [(layer, method) for layer, method in methods if type(method) is UnquantizedFusedMoEMethod]
    for layer, _ in experts:
        for name, as_made in get_layerwise_info(layer).restore_metadata[0].items():
            layer._parameters[name] = restore_layer_refs(materialize_meta_tensor(as_made), layer)
    tensors = tensors_of(files_of(Path(path)))
    cast("Any", model).load_weights(pair for pair in tensors if ".experts." in pair[0] or pair[0].endswith(".sinks"))
    for layer, method in experts:
        method.process_weights_after_loading(layer)


def pack_output_heads(model: "nn.Module") -> None:
    """Pack output heads again, which a reload leaves out where a head is tied to the embedding."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def renew_sinks(model: "nn.Module") -> None:
    """Drop the copies of attention sinks, made at first use, in float32 of float16."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    for layer in model.modules():
        impl = getattr(getattr(layer, "attn", None), "impl", None)
        if isinstance(impl, CPUAttentionBackendImpl) and impl.sinks is not None and hasattr(layer, "sinks"):
            impl.sinks = cast("Any", layer).sinks
