"""The server's answers: to whom, to what, and that no text of a run is anything but text."""

import json
import re
import time
from html import escape

import pytest
from picture_run import GONE, show_pictures
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient

from prl.tools.report.html import digest
from prl.tools.watch import server
from prl.tools.watch.__main__ import main
from prl.tools.watch.server import Site

TOKEN = "a-token-of-16-letters"


@pytest.fixture
def site(folder):
    return Site([folder], TOKEN)


@pytest.fixture
def get(site):
    """`get("rollouts", run="a")`: the answer to a request with the token."""
    client = TestClient(site.app(), raise_server_exceptions=False)
    return lambda name, **query: client.get(f"/{TOKEN}/{name}", params=query)


NAMES = ["", "news", "run", "rollouts", "examples", "picture", "compare", "style.css"]


@pytest.mark.parametrize("token", ["", "a", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "%C3%A9", "x/" + TOKEN])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_told_without_the_token(site, token, name):
    answer = TestClient(site.app()).get(f"/{token}/{name}?run=a", follow_redirects=False)
    assert answer.status_code == 403 and len(answer.text) < 80


@pytest.mark.parametrize("name", ["run", "rollouts", "examples", "picture"])
@pytest.mark.parametrize("run", ["", "..", "../runs/a", "a/../b", "a/", "/etc", "%2e%2e", "c", "a\x00"])
def test_a_run_is_named_as_in_the_list_and_no_path_is_taken(get, folder, name, run):
    (folder.parent / "config.yaml").write_text("seed: 0\n")
    answer = get(name, run=run, step="3")
    assert answer.status_code == 404 and "there is no run" in answer.text


def test_a_step_is_a_number(get):
    for step in ("../../b/rollouts/step_000003", "x", ""):
        assert get("examples", run="a", step=step).status_code == 404
    assert get("examples", run="a", step="-1").json() == {"rows": [], "examples": []}


def test_the_page_may_ask_its_server_alone(get):
    answer = get("")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', answer.text)[1]
    script = re.findall(r"<script>(.*?)</script>", answer.text, re.S)
    assert f"script-src '{digest(script[0])}'; connect-src 'self'; base-uri" in policy and len(script) == 1
    assert "unsafe" not in policy and policy.startswith("default-src 'none'")
    assert answer.headers["referrer-policy"] == "no-referrer", "the address has the token"


def test_a_page_is_served_with_the_slash_that_its_requests_need(site):
    answer = TestClient(site.app()).get(f"/{TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, f"/{TOKEN}/")


def test_one_run_and_its_rollouts(get):
    assert "trainer.example_steps" in get("run", run="a").json()["html"]
    rows = get("rollouts", run="a", least="1", step="3").json()["rows"]
    assert rows and {(row["step"], row["reward"]) for row in rows} == {(3, 1.0)}
    found = get("examples", run="a", step="3").json()
    places = [place for example in found["examples"] for group in example["groups"] for place in group["rollouts"]]
    assert any("sequences" in found["rows"][place] for place in places)


def test_a_picture_is_named_by_its_digest_and_no_other_file_is_served(get, folder):
    digest = show_pictures(folder / "a")
    answer = get("picture", run="a", digest=digest)
    assert answer.content == (folder / "a" / "pictures" / f"{digest}.png").read_bytes()
    assert answer.headers["content-type"] == "image/png" and answer.headers["x-content-type-options"] == "nosniff"
    [prompt] = {str(row["messages"][0]["pictures"]) for row in get("rollouts", run="a").json()["rows"]}
    assert prompt == str([[digest, f"picture {digest[:8]} 6x4"], [GONE, f"picture {GONE[:8]} 20x10"]])
    (folder / "a" / "pictures" / "x.png").write_bytes(b"secret")
    for other in ("", "x", "x.png", f"../pictures/{digest}", digest.upper(), digest + "\x00", digest[:-1], GONE):
        answer = get("picture", run="a", digest=other)
        assert answer.status_code == 404 and "secret" not in answer.text, other
    assert get("picture", run="b", digest=digest).status_code == 404


def test_runs_are_compared_by_what_differs(get, folder):
    for name, seed, rate in (("a", 0, 0.1), ("b", 1, 0.2)):
        (folder / name / "config.yaml").write_text(f"seed: {seed}\noptim: {{lr: {rate}, name: <b>}}\n")
    found = get("compare", run=["a", "b", "none"]).json()
    assert found["runs"] == {"a": {"label": "lr=0.1", "seed": "0"}, "b": {"label": "lr=0.2", "seed": "1"}}
    assert re.search(r"optim\.lr</td><td>0\.1</td><td>0\.2</td>", found["html"]) and "<b>" not in found["html"]
    assert get("compare", run=["gone"]).json()["runs"] == {}
    (folder / "b" / "config.yaml").write_text("seed: 7\noptim: {lr: 0.1, name: <b>}\n")
    assert "Nothing, but for seeds" in get("compare", run=["a", "b"]).json()["html"], (
        "a config is read again once it changed"
    )


def test_a_run_may_have_any_name(get, folder):
    name = "a \x1b[2J<b>&run=b?#%2e\udcff"
    (folder / "b").rename(folder / name)
    shown = r"a \x1b[2J<b>&run=b?#%2e\udcff"
    answer = get("run", run=shown)
    assert answer.status_code == 200 and f"<h1>{escape(shown)}</h1>" in answer.json()["html"]
    assert get("rollouts", run=shown).json()["steps"] == [1, 2, 3]


async def test_a_slow_disk_is_not_silence(site, monkeypatch):
    monkeypatch.setattr(server, "PAUSE_S", 0.02)
    monkeypatch.setattr(server.Feed, "news", lambda feed: [("runs", [time.sleep(0.3)])])
    news = site.news(QueryParams())
    assert [await anext(news) for _ in range(5)] == ["event: tick\ndata: 0\n\n"] * 5
    await news.aclose()


async def test_news_come_as_events(site, folder):
    evil = "\x1b[2J</script>\u2028"
    (folder / "a" / "result.json").write_text(json.dumps({"status": "failed", "error": evil, "seconds": 1}))
    got = {}
    async for event in site.news(QueryParams([("run", "a"), ("at", "")])):
        name, values = re.fullmatch("event: (.*)\ndata: (.*)\n\n", event).groups()
        got[name] = json.loads(values)
        assert not set("<\u2028\x1b") & set(event)
        if len(got) == 4:
            break
    assert set(got) == {"runs", "lines", "state", "tick"}
    assert {entry["name"]: entry["remarks"] for entry in got["runs"]} == {"a": [r"\x1b[2J</script>"], "b": []}
    assert got["lines"]["run"] == "a"
    assert "&lt;/script&gt;" in got["state"]["parts"]["head"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no/such/folder"], "there is no folder no/such/folder"),
        (["--port", "99999"], "--port 99999"),
    ],
)
def test_the_command_refuses(arguments, reason, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2 and reason in capsys.readouterr().err
