"""Whether the filters of both slots can work, before anything is started."""

from prl.config.build import locate_class, run_check
from prl.config.errors import ConfigError
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
            target = getattr(node, "_target_", None)
            if target is None:
                raise ConfigError(f"{where} has no _target_: it must name the class of a Filter")
            if target in found:
                raise ConfigError(f"{where} and {slot}.{found[target]} are both {target}: a filter stands once in a slot")
            found[target] = name
            run_check(locate_class(target, Filter, where), node, where, f"let it take its schema, with +schema/filter@{where}=<name>")
            if not isinstance(getattr(node, "enforce", None), bool):
                raise ConfigError(f"{where}.enforce must be true (drop what matches) or false (only record it)")
