"""Worker extension: methods mixed into vLLM's worker, called by the route `/prl/load_policy`."""


class PolicyWorker:
    """Loads new policy weights into the running engine."""

    def load_policy(self, path: str) -> None:
        """Load the safetensors folder `path` in place, in Hugging Face names, and refresh what vLLM derived from it.

        On CPU the output head keeps a prepacked copy of its weight. A reload does not rebuild that copy when the
        head is tied to the embedding, and the engine would go on sampling with the old head.
        """
        self.reload_weights(weights_path=path)
        self.refresh_heads()

    def refresh_heads(self) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
