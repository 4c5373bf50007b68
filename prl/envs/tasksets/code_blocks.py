"""The code of a reply in chat: its fenced blocks of Markdown, and which of them define what the tests name."""

import ast
import builtins
import functools
import itertools
import re
import symtable
import sys
import warnings
from collections.abc import Iterator, Set
from typing import NamedTuple

MOST_READ = 1 << 15
"""[characters] The end of a reply, in which code is looked for."""
MOST_TRIED = 4
"""Fences that are tried as the end of one block."""
FENCE = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)([^`~]*+)$")
MARGIN = re.compile(r"[ \t>]*+(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]++)*+")
"""Margin that may stand before a fence: blanks, and the signs of quotes and lists."""
PYTHON = re.compile(r"[{.]*+(?:[\w./-]*\.)?(?:i?python|py)[0-9.]*(?![\w-])", re.IGNORECASE)
"""Beginning of the words behind a fence of Python: `python title="a.py"`, `python3.11`, `{.python}`, `src/a.py`."""
DEFINITION = re.compile(r"^[ \t]*+(?:async[ \t]++)?(?:def|class)[ \t]++([^\W\d]\w*+)[ \t]*+[(:]", re.MULTILINE)
THOUGHT_END = re.compile(r"""</think>(?!["'\\])""")
"""Not a text in code."""
BUILTINS = frozenset(dir(builtins))
INSTALLED = {*sys.stdlib_module_names, "numpy"} - {"code"}
"""Modules whose names can be what is asked for; `from code import f` means the code above."""


class Names(NamedTuple):
    """The global names of a program."""

    read: Set[str]
    """Those that it reads, in any function, and does not bind."""
    bound: Set[str]
    made: Set[str]
    """Those of `bound` that have a value of its own, or of an installed module: no other import, no empty function."""


NO_NAMES = Names(frozenset(), frozenset(), frozenset())


@functools.lru_cache(1 << 6)
def global_names(program: str) -> Names | None:
    """Return the global names of a program; None if it is no Python. It is parsed and not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the program: an invalid escape sequence
        try:
            tables = [symtable.symtable(program, "program", "exec")]
            tree = ast.parse(program)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    read: set[str] = set()
    bound: set[str] = set()
    made = {name for node in ast.walk(tree) for name in _installed(node)}
    for table in tables:
        tables += table.get_children()
        names = [symbol for symbol in table.get_symbols() if table is tables[0] or symbol.is_global()]
        read.update(symbol.get_name() for symbol in names if symbol.is_referenced())
        bound.update(symbol.get_name() for symbol in names if symbol.is_assigned() or symbol.is_imported())
        made.update(symbol.get_name() for symbol in names if symbol.is_assigned())
    return Names(read - bound - BUILTINS, bound, (made & bound) - _announced(tree))


def _installed(node: ast.AST) -> list[str]:
    """Return the names that a statement imports from installed modules."""
    if isinstance(node, ast.ImportFrom):
        known = node.level == 0 and (node.module or "").partition(".")[0] in INSTALLED
        return [alias.asname or alias.name for alias in node.names if known]
    if isinstance(node, ast.Import):
        roots = [(alias.name.partition(".")[0], alias.asname) for alias in node.names]
        return [name or root for root, name in roots if root in INSTALLED]
    return []


def _announced(tree: ast.Module) -> set[str]:
    """Return the names of functions without a body, and those with a type and no value, at the end of a program."""
    empty: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            values = [each.value if isinstance(each, ast.Expr) else each for each in node.body]
            empty[node.name] = all(isinstance(each, ast.Constant | ast.Pass) for each in values)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            empty[node.target.id] = node.value is None
        elif isinstance(node, ast.Assign):
            empty |= {target.id: False for target in node.targets if isinstance(target, ast.Name)}
    return {name for name, is_empty in empty.items() if is_empty}


def sure_imports(program: str) -> set[str]:
    """Return the modules and packages that a program imports, but for those of an `if` or a `try`."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(program)]
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0] if node.level == 0 else ".")
        elif not isinstance(node, ast.If | ast.Try):
            nodes += ast.iter_child_nodes(node)
    return found


def code_in(reply: str, wanted: Set[str] = frozenset()) -> str:
    """Return the code of a reply: the last blocks that make the names `wanted`, and names which these read in turn.

    They are blocks in Python, or that say no language. If none makes such a name, it is the last one in Python, else
    the last block, else the whole reply. What is thought before is left out.
    """
    reply = THOUGHT_END.split(reply)[-1]
    blocks = list(blocks_in(reply))
    python = [text for language, text in blocks if PYTHON.match(language)]
    candidates = [(language, text) for language, text in blocks if not language or PYTHON.match(language)]
    chosen: list[str] = []
    missing = set(wanted)
    for language, text in reversed(candidates or blocks):
        names = global_names(text) or (_broken_names(text) if language else NO_NAMES)
        bound = names.made | (names.bound - wanted)
        if missing & bound:
            chosen.insert(0, text)
            missing = (missing | names.read) - bound
    code = "\n".join(chosen or python[-1:] or [text for _, text in candidates or blocks][-1:] or [reply])
    if len(chosen) > 1:  # Python takes `from __future__ import …` before all other lines alone
        lines = sorted(code.split("\n"), key=lambda line: not re.match(r"from __future__ import [^(]", line))
        code = "\n".join(lines)
    return code


def _broken_names(text: str) -> Names:
    """Return the names that a block in Python, which does not compile, was to define; a signature alone has none."""
    found = set(DEFINITION.findall(text))
    return global_names(text.rstrip(": \t\n") + ": ...") or Names(frozenset(), found, found)


def blocks_in(reply: str) -> Iterator[tuple[str, str]]:
    """Yield the words behind the fence, and the text, of each fenced block, also of one that is never closed.

    Blocks are those of CommonMark, with three differences. If Python up to the fence that closes it does not compile,
    the first fence with which it does closes it: docstrings have fences. A fence with words behind it closes a block
    and opens the next. Blocks within a block of Markdown are read, too.
    """
    lines = re.split(r"\r\n?|\n", reply[-MOST_READ:])
    left = 4 * len(reply)  # characters to be parsed, so that no reply takes long
    at = 0
    while at < len(lines):
        fence, margin = _opening(lines[at])
        at += 1
        if fence is None or fence[2].strip() in ("markdown", "md"):
            continue
        marks, words = fence[1], fence[2].strip()
        behind = range(at, len(lines))
        end = next((n for n in behind if _closes(lines[n], marks, margin)), len(lines))
        text = _text(lines[at : end + 1], marks, margin)
        if not words or PYTHON.match(words):
            others = itertools.islice((n for n in behind if marks in lines[n]), MOST_TRIED)
            for other in itertools.chain([end], others) if left > 0 else ():
                tried = _text(lines[at : other + 1], marks, margin)
                left -= len(tried)
                if global_names(tried) is not None:
                    end, text = other, tried
                    break
        yield words, text
        closing = lines[end] if end < len(lines) else ""
        opens_next = closing.partition(marks)[2].strip("`~ \t")
        at = end if opens_next else end + 1


def _opening(line: str) -> tuple[re.Match[str] | None, int]:
    """Return the fence that a line opens a block with, if it does, and how far its text is indented."""
    fence = FENCE.search(line)
    if fence is None:
        return None, 0
    margin = MARGIN.match(line).end()  # type: ignore[union-attr]  # matches nothing, too
    if margin == fence.start():
        return fence, margin
    words = fence[2].strip()
    return (fence, 0) if not words or words.isidentifier() else (None, 0)  # Here it is: ```python


def _closes(line: str, marks: str, margin: int) -> bool:
    """Return whether a line begins with the fence of a block that is open, and at most three blanks further in."""
    inner = line.lstrip(" \t>")
    return inner.startswith(marks) and len(line) - len(inner) <= margin + 3


def _text(lines: list[str], marks: str, margin: int) -> str:
    """Return the text of a block up to the fence in its last line, without the margin that its first fence had."""
    inner = [*lines[:-1], *(line.partition(marks)[0] for line in lines[-1:])]
    return "\n".join(line[:margin].lstrip(" \t>") + line[margin:] for line in inner)
