"""Whether the filters of both slots can work, before anything is started."""

from prl.config.instantiate import class_of, run_check
from prl.errors import ConfigError
from prl.orchestrator.filters import FiltersConfig
from prl.orchestrator.filters.base import Filter


def check_filters(config: FiltersConfig) -> None:
    """Raise ConfigError where a slot holds what is no filter, one type twice, or one whose knobs are off."""
    for slot, nodes in (("filters.pre_batch", config.pre_batch), ("filters.post_batch", config.post_batch)):
        found: dict[str, str] = {}
        for name, node in nodes.items():
            where = f"{slot}.{name}"
            if node is None:
                raise ConfigError(f"{where}=null: to leave the filter out write '~{where}'")
            cls = class_of(node, Filter, where)
            if (same := found.setdefault(node._target_, name)) != name:
                raise ConfigError(f"{where} and {slot}.{same} are both {node._target_}: a filter stands once in a slot")
            run_check(cls, node, where, f"add it, or let the filter take its schema with +schema/filter@{where}=<name>")
            if not isinstance(getattr(node, "enforce", None), bool):
                raise ConfigError(f"{where}.enforce must be true (drop what matches) or false (only record it)")
