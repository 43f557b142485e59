"""Triton's interpreter without the work that it does over and over and that changes nothing. On a GPU nothing is changed.

The language is patched once for each set of its modules: the interpreter lists every member of `triton.language` anew, to
see what it has to replace, for each launch and for each call of a function inside a kernel, where all of it is replaced
already. Half of the time of small kernels went there.

Integers are not added a second time in 64 bits: that second sum is for an assertion, and without `debug`, which nothing
here sets, the interpreter throws it away. What numpy calls a type of the language is looked up, not listed for each tile,
and tiles of one shape share what the language says of it: both are made anew for each number that a kernel computes.
Without a GPU, tensors are not brought into the host's memory and back, where they are.
"""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tilestack.contract.backends import interpreting

Modules = tuple[ModuleType, ...]
Members = list[tuple[Any, str, Any, Any]]  # an owner, an attribute, its own value, and the interpreter's

# What is replaced below; this file may be executed again, and then finds its own in those places.
patch_language, find_numpy_type = map(inspect.unwrap, (interpreter._patch_lang, interpreter._get_np_dtype))
make_type, make_tile = map(inspect.unwrap, (tl.block_type.__init__, tl.tensor.__init__))
modules_seen: weakref.WeakKeyDictionary[Callable, Modules] = weakref.WeakKeyDictionary()
replaced_members: dict[Modules, Members] = {}
numpy_types: dict[str, np.dtype] = {}
shapes_of_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
shapes_of_tiles: dict[tuple[int, ...], tuple[Any, Any]] = {}
patched_modules: set[ModuleType] = set()  # since the present launch began


class LaunchScope(interpreter._LangPatchScope):
    """What a launch has replaced, until it is over."""

    def restore(self) -> None:
        super().restore()
        patched_modules.clear()


def modules_seen_by(function: Callable) -> Modules:
    """The modules of the language among a function's globals."""
    if function not in modules_seen:
        values = (value for value in function.__globals__.values() if inspect.ismodule(value))
        modules_seen[function] = tuple(value for value in values if value in (tl, tl.core))
    return modules_seen[function]


@functools.wraps(patch_language)
def patch_language_once(function: Callable) -> LaunchScope:
    """In the place of `_patch_lang`, which a launch calls, and keeps the scope of, and every function inside a kernel."""
    scope = LaunchScope()
    modules = modules_seen_by(function)
    if modules and patched_modules.issuperset(modules):
        return scope
    if modules in replaced_members:
        for owner, name, own, member in replaced_members[modules]:
            if getattr(owner, name, own) is own:  # what somebody else has put there stays
                scope.set_attr(owner, name, member)
    else:
        scope._changes = patch_language(function)._changes
        replaced_members[modules] = [(owner, name, own, vars(owner)[name]) for owner, name, own in scope._changes]
    patched_modules.update(modules)
    return scope


@functools.wraps(find_numpy_type)
def numpy_type_of(type: Any) -> np.dtype:
    """In the place of `_get_np_dtype`: of the elements of a tile, or of a scalar."""
    name = type.scalar.name
    if name not in numpy_types:
        numpy_types[name] = find_numpy_type(type)
    return numpy_types[name]


@functools.wraps(make_type)
def init_type(self: Any, element_ty: Any, shape: Any) -> None:
    """In the place of `block_type.__init__`: the type of a tile."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if not all(type(size) is int for size in sizes):
        return make_type(self, element_ty, shape)  # which says what is wrong with it
    key = element_ty.name, sizes
    if key not in shapes_of_types:
        make_type(self, element_ty, shape)
        shapes_of_types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
    self.element_ty = element_ty
    vars(self).update(shapes_of_types[key])


@functools.wraps(make_tile)
def init_tile(self: Any, handle: Any, type: Any) -> None:
    """In the place of `tensor.__init__`: a tile, or a scalar."""
    key = tuple(type.shape) if type.is_block() else ()
    if key not in shapes_of_tiles:
        make_tile(self, handle, type)
        shapes_of_tiles[key] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shapes_of_tiles[key]


def arguments_as_they_are(self: Any, arguments: Any, named: Any) -> tuple[Any, Any]:
    """In the place of `_init_args_hst`, which brings tensors into the host's memory."""
    return arguments, named


def nothing_to_bring_back(self: Any, *arguments: Any) -> None:
    """In the place of `_restore_args_dev`."""


if interpreting():
    if not torch.cuda.is_available():  # tensors are in the host's memory
        interpreter.GridExecutor._init_args_hst = arguments_as_they_are
        interpreter.GridExecutor._restore_args_dev = nothing_to_bring_back
    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tile
    interpreter._get_np_dtype = numpy_type_of
    interpreter._patch_lang = patch_language_once
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
