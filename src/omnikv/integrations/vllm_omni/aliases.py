"""Which published names lead to which module of ours, and the rules for turning them on and off.

    engine absent                     install() offers every name of the table
    engine present                    install() raises; install(replace=True) replaces the transfer manager alone
    its manager imported already      both raise; rebind() takes the imported module and class over

A top-level package that really exists is never shadowed, so with a real `vllm` beside no engine its own parallel state
is the one that is read. All that a call did is one stack of undo steps: a failed call unwinds what it began, and
`uninstall()` unwinds the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from omnikv.errors import AliasError
from omnikv.integrations.vllm_omni.finder import AliasFinder

ENGINE = "vllm_omni"
MANAGER = "vllm_omni.distributed.omni_connectors.kv_transfer_manager"

_CONNECTORS = "vllm_omni.distributed.omni_connectors"
_OURS = "omnikv.integrations.vllm_omni"
TABLE: Mapping[str, str] = {
    MANAGER: f"{_OURS}.manager",
    f"{_CONNECTORS}.utils.kv_utils": f"{_OURS}.kv_utils",
    f"{_CONNECTORS}.utils.initialization": f"{_OURS}.initialization",
    f"{_CONNECTORS}.connectors.mooncake_transfer_engine_connector": f"{_OURS}.mooncake",
    "vllm_omni.diffusion.request": f"{_OURS}.request",
    "vllm_omni.diffusion.distributed.parallel_state": f"{_OURS}.diffusion_parallel_state",
    "vllm.distributed.parallel_state": f"{_OURS}.vllm_parallel_state",
}

_MANAGER_CLASS = "OmniKVTransferManager"
# Runners that imported the engine's class reach it through these, so they are replaced in place on the class itself.
_FACTORIES = ("from_od_config", "from_vllm_config", "from_model_config")

_lock = RLock()
_installed: ExitStack | None = None


def install(replace: bool = False) -> None:
    """Nothing; afterwards the published names import as modules of ours. Does nothing when they do already.

    With `replace`, an engine that is really there keeps all of its modules but the KV transfer manager.

    Raises:
        AliasError: the engine is there and `replace` was not asked for, or its manager is imported already. Nothing
            was touched.
    """
    global _installed
    with _lock:
        if _installed is not None:
            return
        if sys.modules.get(MANAGER) is not None:
            raise AliasError(
                f"{MANAGER} is imported already, so code that holds it would not see ours: install before anything "
                f"imports it, or call {_OURS}.rebind() to take it over"
            )
        if not replace and _really_exists(ENGINE):
            raise AliasError(
                f"the package {ENGINE!r} is installed, and its names are not shadowed unasked: call "
                "install(replace=True) to replace its KV transfer manager alone"
            )
        _installed = _offer_names()


def rebind() -> None:
    """Nothing; like `install(replace=True)`, and an engine's manager that is imported already becomes ours.

    The imported module is replaced in `sys.modules` and in its parent package, and the factory class methods of the
    imported class (`from_od_config`, `from_vllm_config`) are replaced in place, because rebinding names does not reach
    code that holds the class. Managers made before stay what they are.

    Raises:
        AliasError: what is imported under the manager's name is not the engine's finished module. Nothing was touched.
    """
    global _installed
    with _lock:
        theirs = sys.modules.get(MANAGER)
        if _installed is not None:
            return
        if theirs is None:
            install(replace=True)
            return
        ours = importlib.import_module(TABLE[MANAGER])
        with ExitStack() as undo:
            undo.push(_offer_names())
            _take_over_module(undo, theirs, ours)
            _take_over_factories(undo, theirs, ours)
            _installed = undo.pop_all()


def uninstall() -> None:
    """Nothing; undoes `install` or `rebind`, and does nothing when neither is in force.

    Code that imported something under a published name keeps what it holds. An import of such a name that is under
    way in another thread may fail, so let those end first.
    """
    global _installed
    with _lock:
        installed, _installed = _installed, None
        if installed is not None:
            installed.close()


def is_installed() -> bool:
    """Whether the published names are ours now."""
    return _installed is not None


def _offer_names() -> ExitStack:
    if _really_exists(ENGINE):
        finder = AliasFinder({MANAGER: TABLE[MANAGER]}, packages=frozenset())
    else:
        table = _without_existing_tops(TABLE)
        finder = AliasFinder(table, frozenset(package for alias in table for package in _packages_above(alias)))
    undo = ExitStack()
    undo.callback(finder.close)
    sys.meta_path.insert(0, finder)
    undo.callback(_remove_finder, finder)
    return undo


def _remove_finder(finder: AliasFinder) -> None:
    sys.meta_path[:] = [other for other in sys.meta_path if other is not finder]


def _without_existing_tops(table: Mapping[str, str]) -> dict[str, str]:
    existing = {top for top in {alias.partition(".")[0] for alias in table} if _really_exists(top)}
    return {alias: ours for alias, ours in table.items() if alias.partition(".")[0] not in existing}


def _packages_above(alias: str) -> list[str]:
    parts = alias.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _really_exists(top: str) -> bool:
    """Whether a package of this name can be imported without us; a folder that merely bears the name does not count."""
    if top in sys.modules:
        return sys.modules[top] is not None
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is not None:
        return spec is not None
    below = [alias.split(".")[1:] for alias in TABLE if alias.partition(".")[0] == top]
    folders = spec.submodule_search_locations or ()
    return any(Path(folder, *parts).with_suffix(".py").exists() for folder in folders for parts in below)


def _take_over_module(undo: ExitStack, theirs: ModuleType, ours: ModuleType) -> None:
    package, _, child = MANAGER.rpartition(".")
    sys.modules[MANAGER] = ours
    undo.callback(sys.modules.__setitem__, MANAGER, theirs)
    parent = sys.modules.get(package)
    if parent is not None and hasattr(parent, child):
        undo.callback(setattr, parent, child, getattr(parent, child))
        setattr(parent, child, ours)


def _take_over_factories(undo: ExitStack, theirs: ModuleType, ours: ModuleType) -> None:
    imported = getattr(theirs, _MANAGER_CLASS, None)
    if not isinstance(imported, type):
        raise AliasError(
            f"{MANAGER} holds no class {_MANAGER_CLASS}: it is still being imported, or is not the engine's module; "
            "call rebind() once its import is done"
        )
    replacement = getattr(ours, _MANAGER_CLASS)
    for name in _FACTORIES:
        if name in vars(imported) and hasattr(replacement, name):
            undo.callback(setattr, imported, name, vars(imported)[name])
            setattr(imported, name, _delegate(getattr(replacement, name)))


def _delegate(factory: Any) -> classmethod[Any, Any, Any]:
    def build(_imported: type, *args: Any, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    return classmethod(build)
