"""The lines of `prl/METRICS.md`, which declares every metric."""

import re
from pathlib import Path

import prl
from prl.base.metric_names import QUANTILES
from prl.rollouts.components import COMPONENTS
from prl.rollouts.rollout import ERROR_KINDS

PAGE = (Path(prl.__file__).parent / "METRICS.md").read_text()
ENTRIES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
"""The first column: patterns of keys."""
PARTS = {
    "<env, all>": "[^/]+",
    "<env>": "(?!all/)[^/]+",
    "<kind>": "|".join(ERROR_KINDS),
    "<component>": "|".join(COMPONENTS),
    "<pool>": "easy|normal|hard",
    "<quantile>": "|".join(QUANTILES),
}


def entry_of(key):
    """The pattern of a key, the most specific one; None for a key that is not on the page."""
    entries = [entry for entry in ENTRIES if re.fullmatch(pattern_of(entry), key)]
    return max(entries, key=lambda entry: len(re.sub("<[^>]+>", "", entry)), default=None)


def pattern_of(entry):
    parts = re.split("(<[^>]+>)", entry)
    return "".join(f"({PARTS.get(part, '.+')})" if part.startswith("<") else re.escape(part) for part in parts)
