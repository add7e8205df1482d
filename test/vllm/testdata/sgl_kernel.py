"""Stands for SGLang's CUDA kernels on a machine without a GPU: importing works, calling does not."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"
__path__ = []


class Missing:
    def __call__(self, *_, **__):
        raise RuntimeError("sgl_kernel is a stub: there is no GPU")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Module(types.ModuleType):
    __path__ = []
    __getattr__ = Missing.__getattr__.__get__(Missing())


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


__getattr__ = Missing().__getattr__
sys.meta_path.insert(0, Finder())
