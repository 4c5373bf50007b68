"""Collects the pages of the tree, and what they link to, for mkdocs: they stay where they are."""

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FOLDERS = ("prl", "conf", "experiments", ".github")
NOTEBOOKS = "experiments/*.ipynb"
OPTIONS = "conf/*.yaml"
REFERENCE = ("API", "CHANGELOG", "experiments/benchmarks/", "skills/")
"""Beginnings of pages that are looked up rather than read."""
LINK = re.compile(r"\]\(([^)#:\s]+)")
CODES = "# --- what follows is the code's"
"""Beginning of the line above which a conf file is written by hand."""
API = {
    "algorithms": ("base", "grpo", "advantage"),
    "losses": ("interface", "rl"),
    "filters": ("base",),
    "curriculum": ("base", "pools"),
    "rollouts": ("rollout", "messages"),
    "envs": ("models", "tasksets.base"),
    "engines": ("base", "protocol"),
    "orchestrator": ("batcher",),
    "trainer": ("schedule",),
    "monitors": ("base",),
    "transport": ("files",),
    "weights": ("base",),
    "launch": ("launcher", "local"),
    "config": ("compose", "schema", "model_reference"),
}
"""Modules that code of one's own imports, by package: their docstrings are the API pages."""


def pages() -> list[Path]:
    """Every page of the tree, from its top."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "AGENTS.md"]
    for folder in FOLDERS:
        found += sorted((ROOT / folder).rglob("*.md"))
    return found


def option_pages() -> dict[str, str]:
    """A page of the options of each group of the config, and of each file beside the groups."""
    texts = {}
    for path in sorted((ROOT / "conf").iterdir()):
        files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        blocks = [
            f"## {file.stem}\n\n```{{.yaml .options}}\n{unwrapped(file.read_text())}```"
            for file in files
            if file.suffix == ".yaml"
        ]
        if blocks:
            texts[f"conf/{path.stem}.md"] = "\n\n".join([f"# `{path.name}`", *blocks])
    return texts


def unwrapped(text: str) -> str:
    """Return a conf file with each comment of the code's in one line: the browser breaks it where its window ends."""
    head, line, fields = text.partition(CODES)
    while (joined := re.sub(r"^( *)(#.*)\n\1# ", r"\1\2 ", fields, flags=re.MULTILINE)) != fields:
        fields = joined
    return head + line + fields


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out the patterns of the navigation."""
    config.nav = [entry for each in config.nav or [] for entry in expanded(each)]
    return config


def expanded(entry: Any) -> list[Any]:
    """An entry of the navigation, with a pattern replaced by the pages that it matches, `API/` by those of packages."""
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return [{title: [page for each in value for page in expanded(each)]}]
    if value == "API/":
        return [{title: ["API.md", *({package: f"API/{package}.md"} for package in API)]}]
    if "*" in value:
        found = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(value))]
        return [{title: list(option_pages()) if value == OPTIONS else found}]
    return [entry]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and each file that one of them links to."""
    sources = set(pages())
    for page in list(sources):
        sources |= {(page.parent / link).resolve() for link in LINK.findall(page.read_text())}
    for path in sorted(sources):
        if path.is_file() and path.suffix != ".yaml":  # see `option_pages`
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    made = {str(notebook.relative_to(ROOT).with_suffix(".md")): as_page(notebook) for notebook in ROOT.glob(NOTEBOOKS)}
    for name, text in (made | option_pages() | api_pages()).items():
        files.append(File.generated(config, name, content=text))
    return files


def api_pages() -> dict[str, str]:
    """A page of the docstrings of each package, and one that lists them."""
    texts, listed = {}, ["# API", "Made from the docstrings of the modules that code of your own imports."]
    for package, modules in API.items():
        about = ast.get_docstring(ast.parse((ROOT / "prl" / package / "__init__.py").read_text())) or ""
        first = about.split("\n\n")[0].replace("\n", " ")
        texts[f"API/{package}.md"] = "\n\n".join(
            [f"# prl.{package}", first, *(f"::: prl.{package}.{module}" for module in modules)]
        )
        listed.append(f"- [prl.{package}](API/{package}.md): {first}")
    return texts | {"API.md": "\n\n".join([*listed[:2], "\n".join(listed[2:])])}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Link to the pages that are made of files and folders, instead of these. Search finds guides first."""
    if page.file.src_uri.startswith(REFERENCE):
        page.meta["search"] = {"boost": 0.5}
    markdown = re.sub(r"(\]\([^)\s]*)\.ipynb\)", r"\1.md)", markdown)
    markdown = re.sub(r"(\]\([^)\s]*\w)/(\w+)\.yaml\)", r"\1.md#\2)", markdown)  # conf/algo/opd.yaml: conf/algo.md#opd
    return re.sub(r"(\]\(\w+)(?:/|\.yaml)\)", r"\1.md)", markdown)  # of conf/README.md: algo/, train.yaml


def as_page(notebook: Path) -> str:
    """A notebook's cells, and what they show, as Markdown."""
    text = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        text.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                text.append(f"![What the cell draws](data:image/png;base64,{data['image/png'].strip()})")
            elif "text/html" in data:
                text.append(re.sub("<table[^>]*>", "<table>", "".join(data["text/html"])))  # the theme's own tables
            else:
                text.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(text)
