"""An engine of one's own, `prl/EXTENDING.md`: a model of transformers behind the three routes of a server."""

import os
import secrets
import sys
from pathlib import Path

from aiohttp import web

from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec, ServerEngine
from prl.engines.protocol import GENERATE, LOAD, TOKEN_VARIABLE
from prl.rollouts.inputs import ModelInput

UNKNOWN = ("detokenize", "n", "priority")  # settings of a request that transformers' model does not take


class MyEngine(ServerEngine):
    @classmethod
    def command(cls, spec: EngineSpec, port: int) -> list[str]:
        return [sys.executable, __file__, spec.model.path, str(spec.model.max_model_len), str(port)]


def application(path: str, max_model_len: int) -> web.Application:
    from prl.engines.transformers import TransformersConfig
    from prl.engines.transformers_model import TransformersPolicy

    model = ModelConfig(path=path, dtype="float32", max_model_len=max_model_len)
    policy = TransformersPolicy(EngineSpec("my_engine", "policy", model, TransformersConfig(), "cpu", 0, "", Path()))
    instance = secrets.token_hex(8)  # of this start: weights that an earlier one had loaded are gone

    @web.middleware
    async def guarded(request, handler):
        if request.headers.get("Authorization") != f"Bearer {os.environ[TOKEN_VARIABLE]}":
            raise web.HTTPUnauthorized
        if request.headers.get("If-Match", instance) != instance:
            raise web.HTTPPreconditionFailed
        return await handler(request)

    async def health(_):
        await policy.wait_ready(60)
        return web.json_response({})

    async def generate(request):
        asked = await request.json()
        sampling = {name: value for name, value in asked["sampling"].items() if name not in UNKNOWN}
        replies = await policy.generate(ModelInput(asked["token_ids"]), sampling, n=asked["sampling"]["n"])
        sampled = [(each.token_ids, each.logprobs, each.finish_reason) for each in replies]
        keys = ("index", "token_ids", "logprobs", "finish_reason")
        choices = [dict(zip(keys, (index, *each), strict=True)) for index, each in enumerate(sampled)]
        return web.json_response({"prompt_token_ids": asked["token_ids"], "choices": choices})

    async def load(request):
        await policy.update_weights(0, (await request.json())["path"])
        return web.json_response({"loaded": True, "instance": instance})

    app = web.Application(middlewares=[guarded])
    app.add_routes([web.get("/health", health), web.post(GENERATE, generate), web.post(LOAD, load)])
    return app


if __name__ == "__main__":
    web.run_app(application(sys.argv[1], int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[3]), print=None)
