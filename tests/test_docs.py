"""The site of the pages: it builds, without a dead link."""

import os
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
    assert 'id="prl.algorithms.base.Algorithm.score_group"' in (tmp_path / "API.html").read_text()
    assert (tmp_path / "prl" / "algorithms" / "grpo.html").is_file()
    assert (tmp_path / "experiments" / "opd_grpo_sft" / "curves.png").is_file()
    assert '<img alt="What the cell draws"' in (tmp_path / "experiments" / "tour.html").read_text()
    navigation = (tmp_path / "index.html").read_text()
    assert all(f'href="{page}.html"' in navigation for page in ("experiments/tour", "prl/algorithms/grpo", "conf/algo"))
    assert 'href="../../conf/algo.html#opd"' in (tmp_path / "prl" / "algorithms" / "opd.html").read_text()
    assert '<h2 id="opd">' in (tmp_path / "conf" / "algo.html").read_text()
