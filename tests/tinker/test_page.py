"""The loop of `prl/tinker/README.md`."""

import re
from pathlib import Path

from tinker_server import KEY

import prl.tinker

PAGE = Path(prl.tinker.__file__).with_name("README.md")


def test_the_loop_of_the_page_runs(client, monkeypatch, capsys):
    url = str(client.http.base_url).partition("/api")[0]
    for name, value in {"BASE_URL": url, "API_KEY": KEY, "TELEMETRY": "0"}.items():
        monkeypatch.setenv(f"TINKER_{name}", value)
    loop = re.search(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)[1]
    exec(compile(loop.replace("range(30)", "range(1)"), "the page", "exec"), {})
    assert re.match(r"0 0\.\d+ \{.*'loss:sum'", capsys.readouterr().out)
