"""What the tests remember of compositions, `tests/support/quick_compose.py`, against Hydra as it is."""

import json
import os
import subprocess
import sys

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import MissingConfigException
from omegaconf import Container, OmegaConf

from prl.config.compose import CONF

CHOSEN = ["env=[math,reverse_text]", "+algo@envs.math.algo=opd", "loss=aipo", "~monitor.console", "filters=none"]
OVERRIDES = [
    ["run.name=x"],
    ["run.name=x", *CHOSEN, "trainer.optim.lr=1e-3"],
    ["run.name=y", *CHOSEN, "seed=3", "+filters.post_batch.mine={_target_: a.B}", "hydra.run.dir=y"],
]


def composed(*overrides):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("train", list(overrides), return_hydra_config=True)


def described(node, key=""):
    """Lines on a node and all in it: values as they are written, types and flags."""
    about = node._metadata
    value = "" if isinstance(node, Container) and isinstance(node._value(), dict | list) else repr(node._value())
    flags = {name: on for name, on in (about.flags or {}).items() if on is not None}
    yield f"{key} {about.object_type} {about.ref_type} {about.optional} {flags} {value}"
    if isinstance(node, Container) and isinstance(children := node._value(), dict | list):
        for name, child in children.items() if isinstance(children, dict) else enumerate(children):
            yield from described(child, f"{key}.{name}")


def test_it_is_what_hydra_composes():
    """Values, their types and flags, where nothing is known yet and where all is."""
    code = (
        f"import json\nfrom {__name__} import *\nprint(json.dumps([list(described(composed(*o))) for o in OVERRIDES]))"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    expected = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr
    for _ in range(2):
        assert [list(described(composed(*overrides))) for overrides in OVERRIDES] == expected


def test_nothing_that_is_done_to_a_config_is_in_the_next():
    before = list(described(composed(*OVERRIDES[1])))
    config = composed(*OVERRIDES[1])
    OmegaConf.set_struct(config, False)
    config.trainer.optim.lr, config.added = 5, [1]
    config.envs.pop("math")
    config.hydra.overrides.task.append("y=1")
    assert list(described(composed(*OVERRIDES[1]))) == before


def test_changed_conf_file_is_read_again(tmp_path):
    (tmp_path / "curriculum").mkdir()
    file = tmp_path / "curriculum" / "mine.yaml"

    def seed(option="mine"):
        return composed("run.name=x", f"hydra.searchpath=[{tmp_path}]", f"curriculum={option}").curriculum.made_of

    for value in (1, 2, 3):
        file.write_text(f"made_of: {value}\n")
        assert seed() == value
    file.with_name("other.yaml").write_text("defaults: [mine]\n")
    assert seed("other") == 3
    file.unlink()
    for option in ("mine", "other"):
        with pytest.raises(MissingConfigException, match="curriculum/mine"):
            seed(option)


def test_a_schema_that_is_stored_again_is_asked_again():
    for value in (1, 2):
        ConfigStore.instance().store(group="curriculum", name="stored", node={"made_of": value})
        assert composed("run.name=x", "curriculum=stored").curriculum.made_of == value
    del ConfigStore.instance().repo["curriculum"]
