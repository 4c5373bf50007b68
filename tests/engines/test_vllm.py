"""vLLM's side of the seam: which clients ask the servers of a model."""

from prl.config.model_reference import FrozenModelConfig
from prl.config.schema import ModelConfig
from prl.engines.base import EngineSpec
from prl.engines.vllm.engine import VLLMConfig, VLLMEngine

MODEL = ModelConfig(path="/m", dtype="float32")


def spec(tmp_path, **options):
    return EngineSpec("engine", "served", MODEL, VLLMConfig(), "cpu", 0, "secret", tmp_path / "log", **options)


async def test_the_policys_client_asks_the_servers_that_were_started(tmp_path):
    pool = VLLMEngine.policy(spec(tmp_path), lambda: ["http://127.0.0.1:9", "http://127.0.0.1:10"])
    assert pool.urls == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
    assert (pool.model, pool.version, pool.http.token) == ("served", 0, "secret")
    await pool.close()


async def test_frozen_clients_have_address_key_and_deadline(tmp_path):
    connect = VLLMEngine.frozen(spec(tmp_path, frozen=True), lambda: ["http://127.0.0.1:9"])
    reference = FrozenModelConfig(name="served", timeout_s=7.0, api_key_var="NOT_SET")
    pool = connect(reference)
    assert (pool.urls, pool.http.token, pool.timeout_s) == (["http://127.0.0.1:9"], "secret", 7.0)
    assert reference.base_url is None, "the config stays as it was written"
    await pool.close()
