"""Options of vLLM's server that the config must not pass on: refused by their key, with the one to use."""

import re

import pytest

from prl.compose import compose
from prl.config.engine_options import ON_A_CPU, OWN_KEYS, REFUSED, check_options
from prl.config.schema import InferenceConfig
from prl.config.signature import hints_of
from prl.config.validate import validate
from prl.errors import ConfigError
from prl.inference.server import LIVE, REQUIRED
from prl.launch import local
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
        config = compose(["run.name=x", *teacher, f"+{where}inference.args.{given}"])
        says = f"{where}inference.args.{key}: prl sets this option itself: write {where}inference.{key}=…"
        with pytest.raises(ConfigError, match=re.escape(says)):
            validate(config)


@pytest.mark.parametrize("option", [*OWN_KEYS, *REFUSED, *ON_A_CPU])
def test_both_spellings_are_refused(option):
    for spelt in (option, option.replace("-", "_")):
        assert refused({"block-size": 16, spelt: "x"}, "teacher.").startswith(f"teacher.inference.args.{spelt}")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"hos": "0.0.0.0"}, "write inference.host="),
        ({"host=0.0.0.0": True}, "write inference.host="),
        ({"no-trust-remote-code": True}, "write model.trust_remote_code="),
        ({"no_enable_scale_out": True}, "cannot be given"),
        ({"block-size": "--host=0.0.0.0"}, "must not begin with -"),
        ({"api_key": "secret"}, "can be read by every user"),
        ({"ssl-keyfile": "key"}, "cannot be given: the run finds the engine by"),
    ],
)
def test_no_way_round(args, says):
    assert says in refused(args)


@pytest.mark.parametrize(
    "name", ["block-size", "enable-prefix-caching", "async_scheduling", "quantization", "hf-overrides"]
)
def test_the_rest_is_vllms(name):
    check_options({name: 1}, "", device="cpu")


def test_what_is_set_on_a_cpu_alone_is_free_on_a_gpu():
    check_options(dict.fromkeys(ON_A_CPU, 1), "", device="cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_forgotten_that_prl_sets(device, config, tmp_path):
    spec = EngineSpec(
        process="engine",
        served_name="policy",
        model=config.model,
        config=InferenceConfig(),
        device=device,
        seed=0,
        token="",
        log=tmp_path / "log",
    )
    words = [*local.engine_command(spec, 8000)[3:], *REQUIRED, *LIVE]
    for word in words:
        if word.startswith("--"):
            refused({word.partition("=")[0].removeprefix("--"): 1}, device=device)


def test_the_keys_that_are_named_exist(config):
    for key in OWN_KEYS.values():
        node, name = key.split(".")
        assert name in hints_of(type(getattr(config, node)))


def test_what_prefills_a_prompt_in_parts_is_refused_on_a_cpu():
    assert "and the engine dies. Leave it out" in refused({"long_prefill_token_threshold": 4})
