"""The import of transformers: the same names as without memory, and found out anew where files have changed."""

import os
import sys

import pytest

from prl import transformers_start
from tests.test_lazy_imports import in_python

COUNTED = """
from transformers.utils import import_utils
models = import_utils.__file__.rpartition("/utils/")[0] + "/models"
def plain(found): return {tuple(sorted(needed)): names for needed, names in found.items()}
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_models_and_packages_are_those_that_transformers_finds():
    code = f"""{COUNTED}
import importlib.metadata
define = import_utils.define_import_structure
for path, prefix in ((models, "models"), (models + "/__init__.py", None), (models + "/qwen3/__init__.py", None)):
    print(plain(define(path, prefix)) == plain(define.args[1].__wrapped__(path, prefix)), len(define(path, prefix)) > 1)
print(import_utils.PACKAGE_DISTRIBUTION_MAPPING == importlib.metadata.packages_distributions())
print(type(import_utils.__spec__.loader).__name__, type(import_utils.__loader__).__name__)
"""
    for _ in range(2):  # found out, and remembered
        assert set(in_python(code).split()) == {"True", "SourceFileLoader"}


def test_the_second_process_reads_no_files_of_models():
    code = f"""
opened = []
def hear(event, args):
    if event == "open" and "/transformers/models/" in str(args[0]): opened.append(args[0])
sys.addaudithook(hear)
{COUNTED}
import transformers.models
print(len(opened))
"""
    assert int(in_python(code)) > 1000
    assert int(in_python(code)) < 10


def test_a_changed_file_is_read_again(tmp_path):
    (tmp_path / "models" / "a").mkdir(parents=True)
    own, file = tmp_path / "utils" / "own.py", tmp_path / "models" / "a" / "modeling_a.py"
    own.parent.mkdir()
    own.touch()
    file.write_text("x = 1")
    seen = []

    def look():
        transformers_start.files_of.cache_clear()
        return transformers_start.files_of(str(own), tmp_path / "models")

    for change in (
        lambda: None,
        lambda: file.write_text("x = 12"),
        lambda: os.utime(file, ns=(0, 0)),
        lambda: (file.parent / "more.py").touch(),
        lambda: (file.parent / "more.py").unlink(),
        lambda: os.utime(own, ns=(0, 0)),
    ):
        change()
        seen.append(look())
    assert seen[4] == seen[2]
    assert len({each[0] for each in seen}) == len(seen) - 1
    (file.parent / "__pycache__").mkdir()
    assert look() == seen[-1]


def test_another_package_has_the_packages_looked_for_again(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr("sys.path", [*sys.path, str(folder)])
    assert "own_of_test" not in transformers_start.installed()
    metadata = folder / "own_of_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: own-of-test\nVersion: 1\n")
    (metadata / "top_level.txt").write_text("own_of_test\n")
    assert transformers_start.installed()["own_of_test"] == ["own-of-test"]
    assert dict(transformers_start.packages_distributions()) == transformers_start.installed()


def test_sharded_tensors_are_not_imported_and_a_model_is_loaded():
    found = in_python("""
from prl import lazy_compiler, transformers_start
from prl.models import model_path
lazy_compiler.install()
transformers_start.without_sharding()
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(model_path("tiny"))
print(torch.distributed.is_available(), "torch.distributed.tensor" in sys.modules)
print(model(torch.ones(1, 2, dtype=torch.long)).logits.shape[:2] == (1, 2))
""")
    assert found.splitlines() == ["True False", "True"]


def test_the_trainer_imports_no_compiler_and_no_sharding_but_with_other_ranks():
    code = """
from prl.trainer import __main__ as trainer
trainer.import_ahead()
print("torch.distributed.tensor" in sys.modules, lazy.is_light(sys.modules["torch._dynamo"]))
"""
    code = f"from prl import lazy_compiler as lazy\n{code}"
    assert in_python(code) == "False True"
    assert in_python(f"import os\nos.environ['WORLD_SIZE'] = '2'\n{code}") == "True True"
