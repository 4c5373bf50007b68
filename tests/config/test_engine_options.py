"""Options of vLLM's server that the config must not pass on: refused by their key, with the one to use."""

import re

import pytest
from prepared_run import validated

from prl.base.errors import ConfigError
from prl.config.build import options_taken
from prl.config.compose import compose
from prl.engines.vllm.engine import VLLMConfig, VLLMEngine
from prl.engines.vllm.options import ON_A_CPU, OWN_KEYS, REFUSED, check_options
from prl.engines.vllm.server import LIVE, REQUIRED
from prl.launch.launcher import EngineSpec


def refused(args, prefix="", device="cpu"):
    with pytest.raises(ConfigError) as caught:
        check_options(args, prefix, device=device)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("where", ["", "teacher."])
def test_a_run_refuses_an_address_beside_its_own(where):
    teacher = ["algo=opd", "teacher=local"] if where else []
    for given, key in (("host=0.0.0.0", "host"), ("port=80", "port")):
        config = compose(["run.name=x", *teacher, f"+{where}engine.args.{given}"])
        with pytest.raises(ConfigError, match=re.escape(f"{where}engine.args.{key}")):
            validated(config)


@pytest.mark.parametrize("option", sorted({*OWN_KEYS, *REFUSED, *ON_A_CPU}))
def test_both_spellings_are_refused(option):
    for spelt in (option, option.replace("-", "_")):
        assert refused({"block-size": 16, spelt: "x"}, "teacher.").startswith(f"teacher.engine.args.{spelt}")


@pytest.mark.parametrize("name", ["no-trust-remote-code", "no_enable_scale_out"])
def test_negations_are_refused_too(name):
    assert refused({name: True}).startswith(f"engine.args.{name}")


@pytest.mark.parametrize(
    "name", ["block-size", "enable-prefix-caching", "async_scheduling", "quantization", "hf-overrides"]
)
def test_the_rest_is_vllms(name):
    check_options({name: 1}, "", device="cpu")


def test_cpu_options_are_free_on_a_gpu():
    check_options(dict.fromkeys(ON_A_CPU, 1), "", device="cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_forgotten_that_prl_sets(device, config, tmp_path):
    spec = EngineSpec(
        process="engine",
        served_name="policy",
        model=config.model,
        config=VLLMConfig(),
        device=device,
        seed=0,
        token="",
        log=tmp_path / "log",
    )
    words = [*VLLMEngine.command(spec, 8000)[3:], *REQUIRED, *LIVE]
    for word in words:
        if word.startswith("--"):
            refused({word.partition("=")[0].removeprefix("--"): 1}, device=device)


def test_the_keys_that_are_named_exist(config):
    for key in OWN_KEYS.values():
        node, name = key.split(".")
        assert name in options_taken(type(getattr(config, node))).annotations
