"""The site of the pages: it builds, without a dead link."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_with_its_pages_and_api(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    command += ["--config-file", str(ROOT / "scripts" / "site" / "mkdocs.yml")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert 'id="prl.algorithms.base.Algorithm.score_group"' in (tmp_path / "API" / "algorithms.html").read_text()
    assert 'href="API/losses.html"' in (tmp_path / "API.html").read_text()
    assert (tmp_path / "prl" / "algorithms" / "grpo.html").is_file()
    assert (tmp_path / "experiments" / "opd_grpo_sft" / "curves.png").is_file()
    assert '<img alt="What the cell draws"' in (tmp_path / "experiments" / "tour.html").read_text()
    navigation = (tmp_path / "index.html").read_text()
    assert all(f'href="{page}.html"' in navigation for page in ("experiments/tour", "prl/algorithms/grpo", "conf/algo"))
    assert 'href="../../conf/algo.html#opd"' in (tmp_path / "prl" / "algorithms" / "opd.html").read_text()
    assert '<h2 id="opd">' in (tmp_path / "conf" / "algo.html").read_text()
    assert "pre-wrap" in (tmp_path / "options.css").read_text()
    options = (tmp_path / "conf" / "trainer.html").read_text()
    assert 'class="options highlight"' in options and 'href="../options.css"' in options
    assert "(FSDP2); null = all, 1 = each rank has a copy (int ≥ 1 or null)</span>" in options  # two lines in the file
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    titles = {entry["location"]: entry["title"] for entry in entries}
    assert "Tool environments" in titles["prl/envs/TOOLS.html"]
    boosts = {entry["location"]: entry.get("boost", 1) for entry in entries}
    assert boosts["prl/envs/TOOLS.html"] > boosts["experiments/benchmarks/environments.html"]
    assert re.search(r"envs\.html#prl\.envs\.models\.model_of", str(titles))
