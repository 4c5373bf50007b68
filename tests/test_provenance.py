"""What `provenance.json` says of a run, and what it keeps to itself."""

import hashlib
import json
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import prl
from prl.runs import provenance


def test_provenance_has_command_code_and_data(tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "prl.train", "run.name=a b"])
    threads = {"engine": 1, "trainer": 2}
    models = {"model": config.model.path}
    provenance.write_provenance(tmp_path, 0, threads, models, {"math": {"train": ["k1", "k2"]}})
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert record["command"] == "python -m prl.train 'run.name=a b'" and record["cwd"] == str(tmp_path)
    assert record["prl"] == prl.__version__ == version("prl") and record["seed"] == 0
    assert record["threads"] == threads
    assert record["packages"].keys() >= {"torch", "transformers", "verifiers", "hydra-core", "omegaconf"}
    assert record["started"].endswith("+00:00") and record["host"]
    assert record["data"]["math"]["train"] == {"tasks": 2, "sha256": hashlib.sha256(b"k1\nk2").hexdigest()}
    assert record["models"]["model"]["method"] == "files"


def git(folder, *arguments):
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_a_checkout_is_its_commit_and_its_changes(tmp_path):
    assert provenance.checkout(tmp_path) == (None, "")
    git(tmp_path, "init")
    (tmp_path / "a").write_text("one\n")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    found, diff = provenance.checkout(tmp_path)
    assert (len(found["commit"]), found["changed"], found["untracked"], diff) == (40, False, [], "")
    (tmp_path / "a").write_text("two\n")
    (tmp_path / "b").touch()
    found, diff = provenance.checkout(tmp_path)
    assert found["changed"] and found["untracked"] == ["b"] and "-one\n+two\n" in diff


def weights(path, header, numbers):
    path.write_bytes(struct.pack("<Q", len(header)) + header + numbers)


def test_large_weights_are_hashed_by_their_headers(tmp_path, monkeypatch):
    weights(tmp_path / "model.safetensors", b"{...}", b"1234")
    content = (tmp_path / "model.safetensors").read_bytes()
    expected = hashlib.sha256(b"model.safetensors\x0017\x00" + hashlib.sha256(content).digest()).hexdigest()
    whole = provenance.model_hash(str(tmp_path))
    assert (whole["method"], whole["sha256"]) == ("files", expected)
    monkeypatch.setattr(provenance, "HASHED_WHOLE", 16)
    headers = provenance.model_hash(str(tmp_path))
    assert headers["method"] == "names, sizes and headers of the files"
    assert headers["sha256"] == hashlib.sha256(b"model.safetensors\x0017\x00{...}").hexdigest()
    weights(tmp_path / "model.safetensors", b"{...}", b"1235")
    assert provenance.model_hash(str(tmp_path)) == headers, "it does not read the numbers"
    assert provenance.model_hash("Qwen/Qwen3-0.6B") == {"path": "Qwen/Qwen3-0.6B", "method": "name only"}


def test_no_secret_of_a_command_line_is_written(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "a8Kd93kXq0Zb72Lw")
    given = ["wandb.api_key=abc", "base_url=http://me:abc@host/v1", "x=a8Kd93kXq0Zb72Lw", "sampling.max_tokens=3"]
    shown = "'wandb.api_key=***' 'base_url=http://***@host/v1' 'x=***' sampling.max_tokens=3"
    assert provenance.command_line(given) == shown


def test_recorded_diff_is_bounded_and_has_no_secrets(tmp_path, monkeypatch):
    diff = "+api_key: X\n+token: str | None = None\n+url = 'https://me:pw@host/v1'\n"
    asked = []
    monkeypatch.setattr(provenance, "checkout", lambda folder: asked.append(folder) or ({}, diff))
    provenance.write_provenance(tmp_path, 0, {}, {}, {})
    assert asked == [Path(__file__).parents[1]]
    expected = "+api_key: ***\n+token: str | None = None\n+url = 'https://***@host/v1'\n"
    assert (tmp_path / "provenance.diff").read_text() == expected
    monkeypatch.setattr(provenance, "MAX_DIFF", 10)
    provenance.write_provenance(tmp_path, 0, {}, {}, {})
    assert (tmp_path / "provenance.diff").read_text() == expected[:10]
