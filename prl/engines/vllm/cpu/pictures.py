"""Pictures on a CPU: torchvision beside a torch for CPUs, in a server whose model sees pictures.

vLLM's models of that kind import torchvision, and the registry has its build for CUDA alone. Its transforms work beside
any torch once the operators are declared that its own library would bring, which cannot be loaded there. scripts/setup
puts it into a folder that only such a server sees. To be removed once vLLM reads pictures without torchvision, or the
registry has its build for CPUs. Written for the version of vLLM in `worker.py`.
"""

import os
import sys
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

VARIABLE = "PRL_PICTURES"
"""Environment variable of a server on a CPU; set to anything, its model sees pictures."""
FOLDER = Path(sys.prefix) / "pictures"
"""Where scripts/setup puts torchvision."""


def search_path() -> list[str]:
    """Return where such a server looks for packages first."""
    return [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]


def install() -> None:
    """Make vLLM ready for pictures in this process and those that it forks, before anything imports torchvision."""
    declare_operators()
    from vllm.model_executor.models import registry

    from prl.engines.vllm.cpu.fork import fork_engine

    # vLLM looks at a model's class in a process of its own, to keep from using a GPU: it would lack the operators.
    registry._run_in_subprocess = lambda look: look()
    fork_engine()
    read_in_core()


def declare_operators() -> None:
    """Declare the operators of torchvision's library where it cannot be loaded; its transforms use none of them."""
    import torch

    found = util.find_spec("torchvision")
    try:
        torch.ops.load_library(str(Path(found.origin or "").with_name("_C.so")) if found else "")
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def read_in_core() -> None:
    """Patch vLLM: its engine core reads a picture's features from the run's store, and is sent none."""
    from vllm.v1.engine.core import EngineCore

    preprocess = EngineCore.preprocess_add_request

    def preprocess_add_request(core: "EngineCore", request: "EngineCoreRequest") -> "tuple[Request, int]":
        for feature in request.mm_features or ():
            feature.data = feature.data or pictures_of(core).item(feature.identifier)
        return preprocess(core, request)

    EngineCore.preprocess_add_request = preprocess_add_request


def pictures_of(core: "EngineCore") -> "Pictures":
    """Return what reads pictures in an engine core."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from prl.engines.vllm.pictures import Pictures

    if not hasattr(core, "prl_pictures"):
        core.prl_pictures = Pictures(MULTIMODAL_REGISTRY.create_processor(core.vllm_config.model_config))
    return core.prl_pictures
