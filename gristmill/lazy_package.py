"""A package whose names are imported when they are first used: importing one of its modules imports no other."""

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package in which `package.x` is the function x, not the module of the same name, whichever comes first."""

    lazy_names: Mapping[str, str]  # module of each name, within the package

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["lazy_names"]
        if name not in modules:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.__name__}.{modules[name]}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in self.__dict__["lazy_names"]:
            value = getattr(value, name)
        super().__setattr__(name, value)


def import_lazily(package: str, names: Iterable[str], modules: Mapping[str, Iterable[str]]) -> None:
    """Make the `names` of a package lazy; `modules` gives the names that are not in a module of their own name."""
    module_of = {name: name for name in names}
    for module, own_names in modules.items():
        module_of |= dict.fromkeys(own_names, module)
    this = sys.modules[package]
    this.__dict__["lazy_names"] = module_of
    this.__class__ = LazyPackage
