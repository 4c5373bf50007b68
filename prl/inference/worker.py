"""Worker extension: methods mixed into vLLM's worker, called by the route `/prl/load_policy`."""

from typing import TYPE_CHECKING, cast

from prl.inference import _vllm_internals

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


class PolicyWorker:
    """Loads new policy weights into the running engine."""

    def load_policy(self, path: str) -> None:
        """Load the safetensors folder `path`, and refresh what vLLM derived from the weights before."""
        _vllm_internals.load_weights(cast("Worker", self), path)
