"""The code of a reply in chat: its fenced blocks of Markdown, and which of them define what the tests name."""

import ast
import builtins
import functools
import itertools
import re
import symtable
import warnings
from collections.abc import Iterator, Set

MOST_READ = 1 << 15
"""[characters] The end of a reply, in which code is looked for."""
MOST_TRIED = 4
"""Fences that are tried as the end of one block."""
FENCE = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)([^`~]*+)$")
MARGIN = re.compile(r"[ \t>]*+(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]++)*+")
"""What may stand before a fence: blanks, and the signs of quotes and lists."""
PYTHON = re.compile(r"[{.]*+(?:[\w./-]*\.)?(?:i?python|py)[0-9.]*(?![\w-])", re.IGNORECASE)
"""How the words behind a fence begin: `python title="a.py"`, `python3.11`, `{.python}`, `src/a.py`."""
DEFINITION = re.compile(r"^(?:[ \t]*+(?:async[ \t]++)?(?:def|class)[ \t]++)?([^\W\d]\w*+)[ \t]*+[(:=]", re.MULTILINE)
BUILTINS = frozenset(dir(builtins))


@functools.lru_cache(1 << 6)
def global_names(program: str) -> tuple[Set[str], Set[str]] | None:
    """Return the global names that a program reads, in any function, and those that it binds; None if it is no Python.

    It is parsed and not run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the program: an invalid escape sequence
        try:
            tables = [symtable.symtable(program, "program", "exec")]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    read: set[str] = set()
    bound: set[str] = set()
    for table in tables:
        tables += table.get_children()
        names = [symbol for symbol in table.get_symbols() if table is tables[0] or symbol.is_global()]
        read.update(symbol.get_name() for symbol in names if symbol.is_referenced())
        bound.update(symbol.get_name() for symbol in names if symbol.is_assigned() or symbol.is_imported())
    return read - bound - BUILTINS, bound


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
    """Return the code of a reply: the last blocks that define the names `wanted`, and names which these read in turn.

    They are blocks in Python, or that say no language. If none defines such a name, it is the last one in Python, else
    the last block, else the whole reply.
    """
    blocks = list(blocks_in(reply))
    python = [text for language, text in blocks if PYTHON.match(language)]
    candidates = [text for language, text in blocks if not language or PYTHON.match(language)]
    chosen: list[str] = []
    missing = set(wanted)
    for text in reversed(candidates or [text for _, text in blocks]):
        read, bound = global_names(text) or (set(), set(DEFINITION.findall(text)))
        if missing & bound:
            chosen.insert(0, text)
            missing = (missing | read) - bound
    last = [text for _, text in blocks][-1:] or [reply.rpartition("</think>")[2]]
    return "\n".join(chosen or python[-1:] or candidates[-1:] or last)


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
