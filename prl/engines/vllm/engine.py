"""vLLM's servers, asked over HTTP."""

from dataclasses import replace

from prl.engines.base import Connect, Engine, EngineSpec, Serve
from prl.engines.client import InferencePool
from prl.engines.frozen import FrozenPool


class VLLMEngine(Engine):
    """vLLM's servers: of the launcher, or those that run already."""

    adds_adapters = True

    @classmethod
    def policy(cls, spec: EngineSpec, serve: Serve) -> InferencePool:
        return InferencePool(serve(spec), spec.served_name, spec.token, shared=bool(spec.config.urls))

    @classmethod
    def frozen(cls, spec: EngineSpec, serve: Serve) -> Connect:
        urls = [f"{url}/v1" for url in serve(spec)]
        return lambda reference: FrozenPool(replace(reference, base_url=urls, api_key_var=None), spec.token)
