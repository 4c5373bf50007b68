"""The engine in the process of the run; its models are in `transformers_model.py`, which imports torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prl.engines.base import Connect, Engine, EngineSpec, InProcessConfig, Serve

if TYPE_CHECKING:
    from prl.engines.transformers_model import TransformersPolicy


@dataclass
class TransformersConfig(InProcessConfig):
    """transformers' model in the process of the run: nothing to start. For small models, debugging and tests."""

    _target_: str = "prl.engines.transformers.TransformersEngine"


class TransformersEngine(Engine):
    """transformers' model in the process of the run: nothing to start. For small models, debugging and tests."""

    Config = TransformersConfig
    largest_adapter = 1024  # or any other: each is computed as it is

    @classmethod
    def policy(cls, spec: EngineSpec, serve: Serve) -> "TransformersPolicy":
        from prl.engines.transformers_model import TransformersPolicy

        return TransformersPolicy(spec)

    @classmethod
    def frozen(cls, spec: EngineSpec, serve: Serve) -> Connect:
        from prl.engines.transformers_model import TransformersReference

        model = TransformersReference(spec)
        return lambda reference: model
