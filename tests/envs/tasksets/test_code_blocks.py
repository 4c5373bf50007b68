"""Which code of a reply env=code runs, in the forms in which chat models write it."""

import textwrap

import pytest

from prl.envs.tasksets.code_blocks import code_in

F = "def f(x):\n    return 2 * x + 1\n"
BARE = "```\n"
BLOCK = f"```python\n{F}```"
IN_DOCSTRING = 'def f(x):\n    """So:\n{fence}f(3)\n```\n"""\n    return 2 * x + 1\n'


def indented(text, margin):
    return textwrap.indent(text, margin)


WORDS = [
    "python",
    "Python",
    "PY",
    "py",
    "python3",
    "python3.11",
    'python title="a.py"',
    "python:a.py",
    "{.python}",
    "{.python .numbers}",
    "{python}",
    ".py",
    "src/a.py",
    "python 3",
    "python{1,3}",
    "ipython3",
    "python, editable",
    "code",
    "",
]
BEHIND = {
    "its output": "For 3:\n```text\n7\n```",
    "output without a language": "```\n7\n```",
    "a command": "```bash\nf=3 python a.py\n```",
    "JSON": '```json\n{"f": 7}\n```',
    "a console session": "```pycon\n>>> f(3)\n7\n```",
    "a session as Python": "```python\n>>> f(3)\n7\n```",
    "usage": "```python\nresult = f(3)\nprint(result)\n```",
    "usage without a language": "```\nassert f(3) == 7\n```",
    "usage that imports it": "```python\nfrom solution import f\nprint(f(3))\n```",
    "usage that imports it by another name": "```python\nimport pytest\nfrom .a import g as f\nassert f(3) == 7\n```",
    "usage that imports it from `code`": "```python\nfrom code import f\nprint(f(3))\n```",
    "tests": "```python\nimport unittest\nfrom solution import f\nclass T(unittest.TestCase):\n"
    "    def test(self): self.assertEqual(f(3), 7)\n```",
    "output that names it": "```\nf(3) = 7\nf(4): 9\n```",
    "output that names it, as Python": "```python\nf(3)  → 7\n```",
    "output that is Python": "```\nf: fast\n```",
    "its formula": "```\nf(x) = 2x + 1\n```",
    "its signature": "```\ndef f(x)\n```",
    "its signature, as Python": "```python\ndef f(x: int = len('a')) -> int\n```",
    "its signature and no body": '```python\ndef f(x: int) -> int:\n    """2x + 1."""\n    ...\n```',
    "a difference": "```diff\n-f = 1\n+f = 2\n```",
    "an open fence": "```",
    "words": "`f` takes O(1), `f(3)` is ``7``.",
}
FORMS = {
    "without a fence": F,
    "carriage returns": BLOCK.replace("\n", "\r\n"),
    "cut off": f"So:\n```python\n{F}",
    "tildes": f"~~~python\n{F}~~~\nDone.",
    "tildes around a fence": f"~~~python\n{IN_DOCSTRING.format(fence=BARE)}~~~",
    "four marks around a fence": f"````python\n{IN_DOCSTRING.format(fence=BARE)}````\nDone.",
    "more marks close": f"```python\n{F}`````\nDone.",
    "blanks around the marks": f"  ```  python  \n{indented(F, '  ')}  ```  \nDone.",
    "fence in a docstring": "```python\n" + IN_DOCSTRING.format(fence=BARE) + "```\nDone.",
    "tagged fence in a docstring": "```python\n" + IN_DOCSTRING.format(fence="```python\n") + "```\n```\n7\n```",
    "fence in a docstring of a list": f"1. So:\n\n   ```py\n{indented(IN_DOCSTRING.format(fence=BARE), '   ')}   ```",
    "in a list": f"1. So:\n\n   ```python\n{indented(F, '   ')}   ```\n2. Done.",
    "in a list, by a tab": f"- So:\n\n\t```python\n{indented(F, chr(9))}\t```\n",
    "behind a bullet": f"- ```python\n{indented(F, '  ')}  ```\n",
    "in a list, closed outside": f"1. So:\n\n   ```python\n{indented(F, '   ')}```\n",
    "quoted": f"> So:\n> ```python\n{indented(F, '> ')}> ```\n> Done.",
    "in a block of Markdown": f"````markdown\n# f\n{BLOCK}\n````",
    "in tags": f"<answer>{BLOCK}</answer>",
    "behind words": f"So: {BLOCK}",
    "behind a thought with code": f"<think>\n```python\ndef f(x): return 0\n```\nNo.</think>\n{BLOCK}",
    "behind a thought with an open fence": f"<think>\n```python\ndef f(x): return 0\nNo.\n</think>\n{BLOCK}",
    "behind a thought, without a fence": f"<think>Is it 2x?</think>\n{F}",
    "behind a thought with a draft, without a fence": f"<think>\n```python\ndef f(x): return 0\n```\n</think>\n{F}",
    "with a thought's end in a text": f"```python\nEND, OTHER = '</think>', '</think>\\n'\n{F}```",
    "better than the first": f"```python\ndef f(x):\n    return x\n```\nBetter:\n{BLOCK}",
    "better than one that is no Python": f"```python\ndef f(x): return (\n```\nBetter:\n{BLOCK}",
    "behind a block that it needs": "```python\nimport operator\ndef two(x): return 2 * x\n```\n"
    "and\n```python\ndef f(x):\n    return operator.add(two(x), 1)\n```",
    "behind an installation": f"```\npip install six\n```\n{BLOCK}",
    "behind a block that it needs, and the future": "```python\ndef two(x): return 2 * x\n```\n"
    "```python\n# So:\nfrom __future__ import annotations\ndef f(x: Missing): return two(x) + 1\n```",
    "behind a function that another module has": "```python\ndef f(x): return x\n```\n"
    "```python\nfrom functools import partial as f\ndef g(x): return 2 * x + 1\nf = f(g)\n```",
    "with a try of another module": f"```python\ntry:\n    from solution import f\nexcept ImportError:\n"
    f"{indented(F, '    ')}```",
    "an escape that Python warns of": f"```python\nDIGIT = '\\d'\n{F}```",
}
ALL = {f"words {words!r}": f"```{words}\n{F}```\nThat is all." for words in WORDS}
ALL |= {f"{name} behind": f"{BLOCK}\n{text}" for name, text in BEHIND.items()} | FORMS


@pytest.mark.parametrize("form", ALL)
def test_the_code_that_defines_what_is_tested_is_found(form):
    names = {}
    exec(code_in(ALL[form], {"f"}), names)
    assert names["f"](3) == 7


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (
            "```python\ndef f(x): return 1\n```\n```python\ndef f(x): return (\n```",
            "def f(x): return (",
        ),  # the last word
        ("```python\ndef f(x): return 1\n```\n```python\ndef f(x): return 2\n```", "def f(x): return 2"),
        ("```python\ndef f(): return 1\n```\n```python\nfrom math import gcd as f\n```", "from math import gcd as f"),
        ("```python\na\n```\n```\nb\n```", "a"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("```js\na\n```\n```c\nb", "b"),
        ("I do not know.", "I do not know."),
    ],
)
def test_what_is_taken_where_the_name_is_made_twice_or_nowhere(reply, code):
    assert code_in(reply, {"f"}).strip() == code


def test_names_may_be_made_in_several_blocks():
    reply = "```python\ndef f(): return 1\n```\n```python\ndef g(): return 2\n```\n```python\nprint(f(), g())\n```"
    names = {}
    exec(code_in(reply, {"f", "g"}), names)
    assert (names["f"](), names["g"]()) == (1, 2)
