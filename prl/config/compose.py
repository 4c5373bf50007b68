"""Compose a config: the options that Hydra knows, and from a composed config to a typed one.

Every component's schema is made from its class (`schema_of`) and registered here, under `/schema/<group>/<name>` for
conf files to build on. Registering imports no torch, vLLM or verifiers.
"""

import functools
import inspect
import pkgutil
import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from prl.algorithms.base import Algorithm
from prl.config.build import nearest, plain, schema_defaults, settled, without_replaced
from prl.config.engine_schema import TransformersConfig
from prl.config.evaluation import EvaluationConfig
from prl.config.run_yaml import quoted
from prl.config.schema import EnvConfig, FiltersConfig, ServeConfig, TrainConfig, VLLMConfig
from prl.config.signature import schema_of
from prl.curriculum.pools import TaskCurriculum
from prl.engines.renderer import RendererConfig
from prl.engines.sampler import Sampler
from prl.errors import ConfigError
from prl.filters.base import Filter
from prl.launch.inline import InlineLauncher
from prl.launch.local import LocalLauncher
from prl.models import model_path
from prl.monitors.base import Monitor
from prl.orchestrator.config import OrchestratorConfig
from prl.trainer.config import (
    AdamWConfig,
    AIPOLossConfig,
    CustomLossConfig,
    DefaultLossConfig,
    FileTransportConfig,
    GSPOLossConfig,
    SGDConfig,
    TrainerConfig,
)
from prl.trainer.schedule import Constant, Cosine, Linear

# In a wheel it lies beside this file, in a checkout one folder up.
CONF = next(folder / "conf" for folder in Path(__file__).parents if (folder / "conf").is_dir())

COMPONENTS = ["renderer", "algo", "sampling", "loss", "curriculum", "orchestrator", "trainer", "transport", "launcher"]
"""Groups that choose a class or a function. Conf files may add keys to their nodes, for another class that they name.
The last of a root's defaults, `/schema/closed`, closes the nodes: on a command line a new key takes a `+`."""
OF_TRAINER = ("optim", "schedule")
"""Likewise groups that choose a class, whose nodes stand in `trainer`."""
REPLACING = {*COMPONENTS, *OF_TRAINER, "filters", "teacher", "engine"} - {"orchestrator", "trainer", "sampling"}
"""Groups whose option is all that a node has."""
READ = {
    "orchestrator": OrchestratorConfig,
    "trainer": TrainerConfig,
    "engine": VLLMConfig,
    "teacher.engine": VLLMConfig,
    "trainer.optim": None,
    "trainer.schedule": None,
}
"""Nodes whose options prl itself reads, with the schema that they have where they name a class of the user's own."""
SLOT_MAPPING = re.compile(r"\+*([\w.-]+\.)?filters(\.(pre|post)_batch)?=\s*\{")


@functools.cache
def components(base: type) -> dict[str, type]:
    """The concrete subclasses of `base` in the modules beside its own, by module name: `grpo` -> GRPOAlgorithm."""
    package = import_module(base.__module__.rpartition(".")[0])
    modules = [import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)]
    return {
        module.__name__.rpartition(".")[2]: cls
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__
        if issubclass(cls, base) and cls is not base and not inspect.isabstract(cls)
    }


def schemas() -> dict[str, Any]:
    """The schema of every component, by `<group>/<name>`."""
    result: dict[str, Any] = {
        "sampling/default": schema_of(Sampler),
        "curriculum/default": schema_of(TaskCurriculum),
        "filters/none": FiltersConfig,
        "engine/default": VLLMConfig,
        "engine/transformers": TransformersConfig,
        "loss/default": DefaultLossConfig,
        "loss/aipo": AIPOLossConfig,
        "loss/gspo": GSPOLossConfig,
        "loss/custom": CustomLossConfig,
        "launcher/inline": schema_of(InlineLauncher),
        "launcher/local": schema_of(LocalLauncher),
        "transport/files": FileTransportConfig,
        "orchestrator/default": OrchestratorConfig,
        "trainer/default": TrainerConfig,
        "optim/adamw": AdamWConfig,
        "optim/muon": AdamWConfig,
        "optim/sgd": SGDConfig,
        "schedule/constant": schema_of(Constant),
        "schedule/cosine": schema_of(Cosine),
        "schedule/linear": schema_of(Linear),
    }
    for file in CONF.glob("renderer/*.yaml"):  # importing the package, which has them, takes seconds
        result[f"renderer/{file.stem}"] = RendererConfig(name=file.stem)
    for group, base in (("algo", Algorithm), ("filter", Filter), ("monitor", Monitor)):
        result |= {f"{group}/{name}": schema_of(cls) for name, cls in components(base).items()}
    return result


def register() -> None:
    """Make the schemas and the `prl.*` resolvers known to Hydra. May be called again."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig)
    store.store(group="schema", name="serve", node=ServeConfig)
    store.store(group="schema/env", name="default", node=EnvConfig)  # for an env without a conf file
    store.store(group="schema", name="eval", node=EvaluationConfig)
    for path, node in schemas().items():
        group, name = path.split("/")
        if group in (*COMPONENTS, *OF_TRAINER):
            node = with_struct(OmegaConf.structured(node), False)
        store.store(group=f"schema/{group}", name=name, node=node)
    for root, groups in (("train", COMPONENTS), ("eval", ("renderer", "sampling", "launcher"))):
        nodes = {group: with_struct(OmegaConf.create(), True) for group in groups}
        if root == "train":
            inside = {group: with_struct(OmegaConf.create(), True) for group in OF_TRAINER}
            nodes["trainer"] = with_struct(OmegaConf.create(inside), True)
        store.store(group="schema/closed", name=root, node=OmegaConf.create(nodes))
    for name, resolver in (("model", model_path), ("choice", choice)):
        OmegaConf.register_new_resolver(f"prl.{name}", resolver, replace=True)


def with_struct(node: DictConfig, struct: bool) -> DictConfig:
    """The node of a component, open (False) or closed for further keys."""
    OmegaConf.set_struct(node, struct)
    return node


def options() -> dict[str, list[str]]:
    """The options of every config group: the files under `conf/`."""
    result: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        result.setdefault(path.parent.name, []).append(path.stem)
    return result


def choice(group: str, *, _root_: Any) -> str:
    """The option chosen of a config group."""
    chosen: str = (_root_.get("hydra") or HydraConfig.get()).runtime.choices.get(group, "run")
    return chosen


def compose(overrides: list[str], run_dir: Path | None = None) -> TrainConfig:
    """The config that `python -m prl.train <overrides>` would use; with `run_dir`, over the config of that run."""
    name, folder = ("train", CONF) if run_dir is None else ("config", run_dir.absolute())
    searched = [] if run_dir is None else [f"hydra.searchpath=[{quoted(f'file://{CONF}')}]"]
    with hydra.initialize_config_dir(str(folder), version_base="1.3"):
        cfg = hydra.compose(name, [*searched, *allow_new_filters(overrides)], return_hydra_config=True)
        return cast(TrainConfig, job_config(cfg, [*searched, *overrides]))


def job_config(cfg: DictConfig, overrides: list[str]) -> Any:
    """As `to_config`, for a config with Hydra's own node in it, where prl's resolvers look."""
    known = HydraConfig.instance()
    before = known.cfg
    known.set_config(cfg)
    try:
        with open_dict(cfg):
            del cfg["hydra"]
        return to_config(cfg, overrides)
    finally:
        known.cfg = before


def allow_new_filters(arguments: list[str]) -> list[str]:
    """Arguments, with `++` before a mapping for filters: Hydra would refuse names that are not there yet."""
    return [f"++{arg.lstrip('+')}" if SLOT_MAPPING.match(arg) else arg for arg in arguments]


def typed(hydra_config: Any) -> list[str]:
    """The overrides that were typed for a job, with interpolations as they are: not all resolve where they stand."""
    return cast(list[str], OmegaConf.to_container(hydra_config.overrides.task, resolve=False))


def to_config(cfg: DictConfig, overrides: list[str]) -> Any:
    """The typed config of a composed one: a TrainConfig, or what else its root schema is.

    Raises ConfigError for a mandatory key without a value, for one that `+key=value` added where nothing reads it, and
    for an interpolation that does not resolve.
    """
    try:
        replace_chosen(cfg, overrides)
        refuse_appended(cfg, {override.partition("=")[0].lstrip("+") for override in overrides})
        replace_slots(cfg, overrides)
        give_types(cfg)
        return settled(OmegaConf.to_object(cfg), [key for key, kind in READ.items() if kind])
    except MissingMandatoryValue:
        missing = min(OmegaConf.missing_keys(cfg))
        raise ConfigError(f"{missing} has no value: give one, {missing}=<value>") from None
    except InterpolationResolutionError as error:  # of a key that is not there too
        raise ConfigError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from error


def give_types(cfg: DictConfig) -> None:
    """Give nodes the schema of the class that they name.

    A file may have written them without, as the `config.yaml` of a run is, or an override named another class.
    """
    by_target = {getattr(schema, "_target_", None): schema for schema in schemas().values()}
    for key, of_other_classes in READ.items():
        node = OmegaConf.select(cfg, key)
        if not isinstance(node, DictConfig):
            continue
        present = OmegaConf.get_type(node)
        kind = by_target.get(node.get("_target_"), of_other_classes if present is dict else None)
        if kind in (None, present):
            continue
        options: Any = OmegaConf.to_container(node)
        if present is not dict:
            options = without_replaced(options, schema_defaults(node), plain(kind()))
        # Not struct: a class of the user's own may have further options.
        typed_node = OmegaConf.merge(OmegaConf.structured(kind, flags={"struct": False}), options)
        OmegaConf.update(cfg, key, typed_node, merge=False)


def replace_chosen(cfg: DictConfig, overrides: list[str]) -> None:
    """Make an option of a group that was chosen over the config of a run (`+loss=aipo`) replace the run's own.

    Hydra has merged it with what the run's config has there. What the option does not have goes, but for typed keys.
    """
    if not HydraConfig.initialized() or HydraConfig.get().job.config_name != "config":
        return
    searched = [override for override in overrides if override.startswith("hydra.searchpath=")]
    typed_keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    for override in overrides:
        key = override.partition("=")[0]
        group, _, package = key.lstrip("+").partition("@")
        if key.startswith("+") and group in REPLACING:
            fresh = hydra.compose(overrides=[*searched, override])
            where = package or (f"trainer.{group}" if group in OF_TRAINER else group)
            drop_others(OmegaConf.select(cfg, where), OmegaConf.select(fresh, where), where, typed_keys)


def drop_others(node: DictConfig, fresh: DictConfig, where: str, typed_keys: list[str]) -> None:
    """Drop the keys of a node that `fresh` does not have, in any depth, but for those that were typed."""
    for name in list(node):
        key, child = f"{where}.{name}", node._get_node(name)
        other = fresh._get_node(name) if name in fresh.keys() else None  # noqa: SIM118 (`in` resolves interpolations)
        if other is None and not any(f"{each}.".startswith(f"{key}.") for each in typed_keys):
            with open_dict(node):
                del node[name]
        elif isinstance(child, DictConfig) and isinstance(other, DictConfig) and not child._is_none():
            drop_others(child, other, key, typed_keys)


def refuse_appended(cfg: DictConfig, given: Collection[str], where: str = "") -> None:
    """Raise ConfigError for a key that was added beside those of a schema: nothing would ever read it.

    What a component is `given` on the command line is left to its own signature, and so are classes other than prl's.
    """
    known = schema_defaults(cfg)
    target = known.get("_target_")
    ours = target is not None and target.startswith("prl.") and cfg["_target_"] == target
    for name in cfg:
        key = where + str(name)
        if known and name not in known and (target is None or (ours and key not in given)):
            schema = cast(type, OmegaConf.get_type(cfg)).__name__
            raise ConfigError(f"{key}: there is no such key in {schema}; {nearest(key, known, 'keys there')}")
        child = cfg._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            refuse_appended(child, given, f"{key}.")


def replace_slots(cfg: DictConfig, overrides: list[str]) -> None:
    """Make `filters.post_batch={…}` replace the slot: Hydra has merged it with the filters that were there.

    What the value names keeps the options that it does not set; the slot's order is the value's. A filter that another
    override names stays too.
    """
    for override in OverridesParser.create().parse_overrides(list(filter(SLOT_MAPPING.match, overrides))):
        key, value = override.key_or_group, cast(dict[str, Any], override.value())
        apart = [name for other in overrides for name in re.findall(rf"^(?:[^=~]*[+@])?{re.escape(key)}\.(\w+)", other)]
        slots = {f"{key}.{slot}": named for slot, named in value.items()} if key.endswith("filters") else {key: value}
        for slot, named in slots.items():
            if isinstance(named, dict):
                merged = plain(OmegaConf.select(cfg, slot))
                kept = {name: merged[name] for name in [*map(str, named), *apart] if name in merged}
                OmegaConf.update(cfg, slot, kept, merge=False, force_add=True)


register()
