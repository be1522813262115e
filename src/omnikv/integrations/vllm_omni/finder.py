"""How one module object comes to be importable under a second name.

The import system asks the finders on `sys.meta_path` for a spec, lets the spec's loader make a module, binds it in
`sys.modules` under the spec's name, executes it, and sets it as an attribute of its parent package. Here the loader
"makes" a module of ours that exists already and executes nothing, so both names lead to one object: patching a global
under the engine's name patches the global that our code reads. The import system overwrites `__spec__` on the way;
the loader puts the module's own back, so that reloading and pickling go by our name.

Whatever an import through the finder leaves behind is recorded, and `close()` takes exactly that away.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import Lock
from types import ModuleType

_ABSENT = object()


class AliasFinder(MetaPathFinder):
    """Finds each alias of `table` as the module of ours that it names, and each of `packages` as an empty package."""

    def __init__(self, table: Mapping[str, str], packages: frozenset[str]) -> None:
        self._table = dict(table)
        self._packages = packages
        self._lock = Lock()
        self._closed = False
        self._undo: list[Callable[[], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias or of a package above one; None for every other name."""
        if fullname in self._table:
            return ModuleSpec(fullname, _AliasLoader(self, self._table[fullname]), origin=self._table[fullname])
        if fullname in self._packages:
            return ModuleSpec(fullname, _EmptyPackageLoader(self), is_package=True)
        return None

    def admit(self, name: str, module: ModuleType) -> None:
        """Nothing; records that `name` now leads to `module`, to be undone by `close`.

        Raises:
            ImportError: the finder was closed while this import was on its way.
        """
        parent = sys.modules.get(name.rpartition(".")[0])
        before = _ABSENT if parent is None else vars(parent).get(name.rpartition(".")[2], _ABSENT)
        with self._lock:
            # Raising here makes the import system take the name out of sys.modules again.
            if self._closed:
                raise ImportError(f"the alias {name!r} was taken away while it was being imported", name=name)
            self._undo.append(lambda: forget(name, module, parent, before))

    def close(self) -> None:
        """Nothing; afterwards no name leads to our modules through this finder. Idempotent."""
        with self._lock:
            self._closed = True
            undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()


def forget(name: str, module: ModuleType, parent: ModuleType | None, before: object) -> None:
    """Nothing; takes `module` out of `sys.modules[name]` and gives its parent back the attribute it had `before`."""
    if sys.modules.get(name) is module:
        del sys.modules[name]
    child = name.rpartition(".")[2]
    # Someone else's later binding is theirs to keep.
    if parent is None or vars(parent).get(child) is not module:
        return
    if before is _ABSENT:
        delattr(parent, child)
    else:
        setattr(parent, child, before)


class _AliasLoader(Loader):
    def __init__(self, finder: AliasFinder, ours: str) -> None:
        self._finder = finder
        self._ours = ours
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        alias = module.__spec__
        module.__spec__ = self._own_spec
        if alias is not None:
            self._finder.admit(alias.name, module)


class _EmptyPackageLoader(Loader):
    def __init__(self, finder: AliasFinder) -> None:
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, "Holds names that omnikv offers in an absent engine's place; nothing of its own.")

    def exec_module(self, module: ModuleType) -> None:
        self._finder.admit(module.__name__, module)
