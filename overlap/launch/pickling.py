"""Functions on their way to a rank: those that it could not import travel as code."""

from __future__ import annotations

import importlib.machinery
import io
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

# cloudpickle's list of modules to take along is one for the whole process.
_lock = threading.Lock()
_OURS = {"overlap", "__main__", "__mp_main__"}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the names of source files, which cloudpickle drops: tracebacks show the line that failed."""

    def reducer_override(self, obj: Any) -> Any:
        reduce = self.dispatch_table.get(CodeType)
        if not isinstance(obj, CodeType) or reduce is None:
            return super().reducer_override(obj)
        make, arguments = reduce(obj)[:2]
        return make, tuple(
            obj.co_filename if isinstance(argument, str) and argument == "<dynamic-code>" else argument
            for argument in arguments
        )


def dumps(value: Any, path: Sequence[str], function: Any) -> bytes:
    """Pickle `value` for a process whose `sys.path` is `path`, with the code it would not find there.

    Raises:
        TypeError, ValueError, ...: what pickling raised.
    """
    with _lock:
        known = set(cloudpickle.list_registry_pickle_by_value())
        added = [module for module in _out_of_reach(path, function) if module.__name__ not in known]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            buffer = io.BytesIO()
            _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
            return buffer.getvalue()
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


def _out_of_reach(path: Sequence[str], function: Any) -> list[ModuleType]:
    """Find the loaded modules that are not, or are other ones, on `path`."""
    found = []
    for name, module in list(sys.modules.items()):
        if "." in name or name in _OURS or name in sys.stdlib_module_names:
            continue
        if isinstance(module, ModuleType) and module.__name__ == name and _missing(name, module, path):
            found.append(module)
    # A package may be there without the module: test files, say, that a test runner loaded by their paths.
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is not None and "." in home.__name__ and home.__name__.partition(".")[0] not in _OURS:
        names = home.__name__.split(".")
        places: Sequence[str] = path
        for depth in range(1, len(names) + 1):
            spec = importlib.machinery.PathFinder.find_spec(".".join(names[:depth]), places)
            if spec is None:
                found.append(home)
                break
            places = list(spec.submodule_search_locations or [])
    return found


def _missing(name: str, module: ModuleType, path: Sequence[str]) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        # A package without __init__.py has only places; what has neither is built into Python.
        return bool(getattr(module, "__path__", None)) and _find(name, path) is None
    if not file.endswith(".py"):
        return False  # compiled code can't travel
    spec = _find(name, path)
    return spec is None or spec.origin is None or os.path.realpath(spec.origin) != os.path.realpath(file)


def _find(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None:
        # Editable installs are found by finders of their own, which the rank's interpreter has too.
        for finder in sys.meta_path:
            if getattr(finder, "__module__", "").startswith("__editable__"):
                spec = spec or finder.find_spec(name, None)
    return spec
