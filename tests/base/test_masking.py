"""What looks like a secret, by its name or its shape, and what only sounds like one."""

import pytest
from omegaconf import OmegaConf
from prepared_run import run_dir_of

from prl.base.masking import is_secret, masked, masked_text
from prl.config.build import plain
from prl.config.compose import compose
from prl.config.run_yaml import without_run, yaml_of

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9.c2lnbmVk"


SECRET_NAMES = [
    "api_key", "api-key", "apiKey", "X-Api-Key", "api_keys", "api_key_openai", "APIKey", "JWTSecrets",
    "hf_token", "myHFToken", "authToken", "SLURM_JWT", "VLLM_AUTH", "AWS_SECRET_ACCESS_KEY", "clientSecret",
    "PGPASSWORD", "db.passwd", "passphrase", "Authorization", "cookie", "credentials", "OPENAI_KEY",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_value_is_secret_by_its_name(name):
    assert masked({"env": {name: "X"}}) == {"env": {name: "***"}}
    assert masked({name: {"a": ["X", 7, "</x y>"], "b": None}}) == {name: {"a": ["***"] * 3, "b": None}}
    plain = {name: [None, True, "", "null", "${oc.env:KEY}", "***"]}
    assert masked(plain) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", "X"),
        ("auth", "a8Kd93kXq0Zb72Lw"),
        ("judge_key", "a1b2c3d4e5f6a7b8"),
        ("keys", "550e8400-e29b-41d4-a716-446655440000"),
        ("pass", "q9Xc-77vBn2Lk0_PwRt5"),
    ],
)
def test_under_other_names_what_looks_drawn_is_secret(name, value):
    assert masked({name: value}) == {name: "***"} and masked({name: [value, 7]}) == {name: ["***", 7]}
    shown = [f"x.{name}=***", f"--{name}", "***", value[:3]]
    assert masked([f"x.{name}={value}", f"--{name}", value, value[:3]]) == shown


PLAIN = {
    "max_tokens": 8,
    "answer_key": "final_answer_12345",
    "sort_key": "row.meta.index.2024",
    "column_key": "FinalAnswerColumn2024",
    "model_key": "Qwen/Qwen2.5-Math-1.5B-Instruct",
    "hash_keys": ["prompt"],
    "monkey": "abcdefgh12345678901",
    "api_key_var": "OPENAI_API_KEY",
    "token_file": "/run/token",
    "author": "Bob",
    "tokenizer": "qwen",
    "use_auth": True,
    "eos_token": "<|im_end|>",
    "stop_token": "STOP",
    "answer_token": "Answer:",
    "start_token": 1234567890,
    "OLDPWD": "/home/me",
    "url": "http://host:8000/v1?a=b@c",
    "run_name": "sk-lora-r16-2024",
    "model_path": "models/hf_smollm2_135m",
    "models": ["org/sk-model-2024-instruct", "outputs/gpt-hf_smol-135m"],
}


@pytest.mark.parametrize("name, value", PLAIN.items())
def test_other_values_stay_as_they_are(name, value):
    assert masked({name: value}) == {name: value}
    assert masked([f"+x.{name}={value}"]) == [f"+x.{name}={value}"]


@pytest.mark.parametrize(
    "text",
    [
        "if password == guess:",
        "def __init__(self, secret: str, tries: int = 3)",
        "secrets: list[str] = []",
        "password = getpass.getpass()",
        "tests/test_secret.py::test_x FAILED",
        "env@envs.secret=jsonl",
        "envs.password_game.weight=1",
        "num_secrets: 3, secret_length: 4",
        "max_session_tokens: 4096",
        "api_key: EMPTY",
    ],
)
def test_code_counts_and_env_names_stay(text):
    assert masked_text(text) == text and masked([text]) == [text]


def test_an_env_may_be_called_as_secrets_are():
    config = {"envs": {"secret_word": {"weight": 1.0}}}
    assert masked(config) == config


def test_a_config_without_secrets_is_written_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "training")
    overrides = ["run.name=sk-lora-r16-2024", "+env@envs.jsonl=jsonl", "model.path=a/hf_smol-135m"]
    overrides += ["envs.jsonl.args.answer_key=final_answer_12345", "envs.jsonl.args.path=s3://training@x/y"]
    config = compose([*overrides, f"run.dir={tmp_path}/x"])
    written = yaml_of((run_dir_of(config) / "config.yaml").read_text())
    assert written == without_run(OmegaConf.to_container(OmegaConf.create(plain(config))))


@pytest.mark.parametrize(
    "text, shown",
    [
        ("sk-proj-a_b-8Kd93kXq0Zb72LwT5v_x", "***"),
        ("key sk-abcdefgh12345678 refused", "key *** refused"),
        ("hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh", "***"),
        ("ghp_ABCDEFGHIJKLMNOPQRST12", "***"),
        (f"got {JWT}.", "got ***."),
        ("curl -H 'Authorization: Bearer abc.def'", "curl -H 'Authorization: ***'"),
        ("http://me:p@ss@host/v1 and https://x@y/", "http://***@host/v1 and https://x@y/"),
        ("error: api_key: X", "error: api_key: ***"),
        ("{'api_key': 'X', 'n': 1}", "{'api_key': '***', 'n': 1}"),
        ('{"token": "X", "max_tokens": 5}', '{"token": "***", "max_tokens": 5}'),
        ("a?access_token=x1&n=2", "a?access_token=***&n=2"),
        ("db={password: 'correct horse battery'}", "db={password: '***'}"),
        ("-H X-Api-Key: two, words\nx", "-H X-Api-Key: ***\nx"),
        ('{\\"password\\": \\"a b\\", \\"n\\": 1}', '{\\"password\\": \\"***\\", \\"n\\": 1}'),
        ("prl x --password hunter2 --api-key sk123 a", "prl x --password *** --api-key *** a"),
        ("GET https://h/v1?key=abcd1234&n=2&sig=x%2F", "GET https://h/v1?key=***&n=2&sig=***"),
        ("f(password=a,b, n=1)", "f(password=***, n=1)"),
        ("api_keys: [a, b], secrets: {db: a}, n: 1", "api_keys: ***, secrets: ***, n: 1"),
        ("+password: str | None = 'a b'", "+password: str | None = '***'"),
        ('os.environ["WANDB_API_KEY"] = "hunter2"', 'os.environ["WANDB_API_KEY"] = "***"'),
        ("DB_PASS=hunter2 JUDGE_TOKEN=abc", "DB_PASS=*** JUDGE_TOKEN=***"),
        ("?X-Amz-Security-Token=fe5f80", "?X-Amz-Security-Token=***"),
        ("wandb login " + "0123456789" * 4, "wandb login ***"),
        ("gsk_abcdefgh12345678ABCD", "***"),
        ("error: judge_key: a1b2c3d4e5f6a7b8 refused", "error: judge_key: *** refused"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nx", "***\nx"),
        ("it was the-value-of-it", "it was ***"),
    ],
)
def test_secrets_in_a_text(text, shown, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "the-value-of-it")
    assert masked_text(text) == shown == masked_text(shown)


def test_arguments_are_masked_by_their_keys():
    nested = "a={_target_: b.c, api_key: X},env=d,e=http://me:X@h,f=1"  # as Hydra names a job
    assert masked(nested) == "a={_target_: b.c, api_key: ***},env=d,e=http://***@h,f=1"
    given = ["x.password='a b'", "+env.api_key=[1,b]", "lr=0.1", "a={token:b1,c:d}"]
    assert masked(given) == ["x.password=***", "+env.api_key=***", "lr=0.1", "a={token:***,c:d}"]
    given = ["prl", "--password", "hunter2", "--api-key", "sk123", "--name", "x"]
    assert masked(given) == ["prl", "--password", "***", "--api-key", "***", "--name", "x"]


@pytest.mark.parametrize(
    ("value", "text", "shown"),
    [
        ("training", "error: training failed", "error: training failed"),
        ("correct horse", "the correct horse and correct horses", "the *** and correct horses"),
        ("a8Kd93kXq0Zb72Lw", "sent a8Kd93kXq0Zb72Lw", "sent ***"),
    ],
)
def test_environment_values_are_masked_as_whole_words(value, text, shown, monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", value)
    monkeypatch.setenv("PWD", "/home/me/project")
    assert masked_text(text) == shown and masked_text("in /home/me/project") == "in /home/me/project"


def test_random_looking_environment_values_are_masked_in_configs(monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "correct-horse")
    monkeypatch.setenv("VLLM_AUTH", "a8Kd93kXq0Zb72Lw")
    values = ["a8Kd93kXq0Zb72Lw", "x=a8Kd93kXq0Zb72Lw", "a8Kd93kXq0Zb72Lw.pt", "correct-horse"]
    assert masked(values) == ["***", "x=***", "a8Kd93kXq0Zb72Lw.pt", "correct-horse"]
    assert is_secret("VLLM_AUTH", "abcdefgh")
