"""Episodes of prl's multi-turn envs: demonstrated, as rows to learn from, or sampled from a model, for its reward.

A demonstration runs the env's own rules over turns that are rendered as `prl.rollouts.conversation` renders them. A
sampled episode is a rollout as in a run, with a batched `generate` in place of the engine.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.types import UserMessage

from prl.config.schema import EnvConfig
from prl.inference.client import Completion
from prl.rollouts.environment import Environment
from prl.rollouts.episode import parse
from prl.rollouts.rollout import Rollout
from prl.rollouts.tools import Tools

from .demonstrations import DEMONSTRATORS, Demonstrator

CONF = Path(__file__).parents[2] / "conf" / "env"
Row = tuple[list[int], list[int]]
"""Token ids, and labels: the same, or -100 where nothing is to be learnt."""


def environment(env: str, *, num_tasks: int, eval_tasks: int = 0) -> Environment:
    """The env as `conf/env` configures it, with that many tasks of each split; fewer where it has no more."""
    conf = OmegaConf.merge({"seed": 0}, OmegaConf.load(CONF / f"{env}.yaml"))
    del conf.seed if False else None
    return conf


class Demonstrations:
    """Rows of one env, by its demonstrator; `right` and `echoed` are chances, of a reply and of a tool's answer."""
