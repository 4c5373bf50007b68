"""What looks like a secret, by its name or its shape, and what only sounds like one."""

import pytest

from prl.masking import masked, masked_text

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9.c2lnbmVk"


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "api-key",
        "apiKey",
        "apikey",
        "X-Api-Key",
        "token",
        "hf_token",
        "authToken",
        "SLURM_JWT",
        "VLLM_AUTH",
        "AWS_SECRET_ACCESS_KEY",
        "clientSecret",
        "password",
        "PGPASSWORD",
        "db.passwd",
        "passphrase",
        "Authorization",
        "cookie",
        "credentials",
        "OPENAI_KEY",
    ],
)
def test_a_value_is_secret_by_its_name(name):
    assert masked({"env": {name: "X"}}) == {"env": {name: "***"}}
    assert masked({name: {"a": ["X", 7], "b": None}}) == {name: {"a": ["***", 7], "b": None}}


@pytest.mark.parametrize(
    "name, value",
    [
        ("token_batch_size", 8),
        ("max_tokens", 8),
        ("demo_key", "demonstration"),
        ("sort_key", "length"),
        ("hash_keys", ["prompt"]),
        ("api_key_var", "PRL_TEACHER_KEY"),
        ("token_file", "/run/token"),
        ("author", "Bob"),
        ("tokenizer", "qwen"),
        ("use_auth", True),
        ("password", None),
        ("password", ""),
        ("eos_token", "<|im_end|>"),
        ("stop_token", 151645),
        ("api_key", "${oc.env:KEY}"),
        ("OLDPWD", "/home/me"),
        ("credentials", "~/.aws/keys"),
        ("url", "http://host:8000/v1?a=b@c"),
        ("name", "sk-learn hf_transfer"),
    ],
)
def test_other_values_stay_as_they_are(name, value):
    assert masked({name: value}) == {name: value}


@pytest.mark.parametrize(
    "text, shown",
    [
        ("sk-proj-abc_DEF-123456789", "***"),
        ("key sk-abc123 refused", "key *** refused"),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("ghp_ABCDEFGHIJKLMNOPQRST12", "***"),
        (f"got {JWT}.", "got ***."),
        ("curl -H 'Authorization: Bearer abc.def'", "curl -H 'Authorization: Bearer ***'"),
        ("http://me:p@ss@host/v1 and https://x@y/", "http://***@host/v1 and https://***@y/"),
        ("error: api_key: X", "error: api_key: ***"),
        ("{'api_key': 'X', 'n': 1}", "{'api_key': '***', 'n': 1}"),
        ('{"token": "X", "max_tokens": 5}', '{"token": "***", "max_tokens": 5}'),
        ("SLURM_JWT=a VLLM_AUTH=b", "SLURM_JWT=*** VLLM_AUTH=***"),
        ("a?access_token=x1&n=2", "a?access_token=***&n=2"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nx", "***\nx"),
        ("the token: start it with this run's own", "the token: start it with this run's own"),
        ("known by its_name", "known by its_name"),
        ("it was the-value-of-it", "it was ***"),
    ],
)
def test_secrets_in_a_text(text, shown, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "the-value-of-it")
    assert masked_text(text) == shown == masked_text(shown)


def test_arguments_are_masked_by_their_keys():
    nested = "a={_target_: b.c, api_key: X},env=d,e=http://me:X@h,f=1"  # as Hydra names a job
    assert masked(nested) == "a={_target_: b.c, api_key: ***},env=d,e=http://***@h,f=1"
    assert masked(["x.password='a b'", "+env.api_key=[1,b]", "lr=0.1", "a={token:b1,c:d}"]) == [
        "x.password=***",
        "+env.api_key=***",
        "lr=0.1",
        "a={token:***,c:d}",
    ]


def test_a_key_of_any_name_is_secret_if_its_value_looks_drawn():
    assert masked({"judge_key": "a1b2c3d4e5f6a7b8"}) == {"judge_key": "***"}
