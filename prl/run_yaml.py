"""The YAML files of a run directory, which may come from a stranger."""

from typing import Any

import yaml
from omegaconf import OmegaConf

BEGINS, ENDS = "---\n", "...\n"
"""Marks of YAML at the start and the end of `config.yaml`: one that has the first and not the second was cut off."""


def yaml_of(text: str) -> Any:
    """The content of a run's YAML file, with interpolations as they are.

    Raises ValueError where it was cut off or has aliases, and whatever YAML and OmegaConf raise.
    """
    if text.startswith(BEGINS) and not text.rstrip().endswith(ENDS.strip()):
        raise ValueError("its end is missing")
    for token in yaml.scan(text, Loader=yaml.SafeLoader) if "&" in text else ():
        if isinstance(token, yaml.AliasToken | yaml.AnchorToken):  # a few lines of them spell out to gigabytes
            line = token.start_mark.line + 1
            raise ValueError(f"line {line} has an alias or an anchor, which prl never writes: write its value out")
    return OmegaConf.to_container(OmegaConf.create(text))
