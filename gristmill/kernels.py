"""Kernels: functions compiled by numba, and their cache on disk, which has no outdated code.

    @kernel
    def count(values: np.ndarray) -> int: …

numba, which takes longer to import than all else, is imported when a kernel is first called.

numba's own cache (`cache=True`) compares only the file that defines a function, so it keeps using the old code of
the functions that it calls. Here a compiled kernel is stored under a fingerprint of everything that is compiled into
it: its bytecode, its options, and the values of the globals that it uses, which include the kernels that it calls.
There is one file for each kernel, signature, processor and version of Python and numba: processes that write at the
same time write equal files.
"""

import hashlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import Any, TypeVar, overload
from uuid import uuid4

import numpy as np

from gristmill.paths import user_cache

Function = TypeVar("Function", bound=Callable[..., Any])
SUFFIX = ".kernel"
_PACKAGE = Path(__file__).resolve().parent
_PLAIN = (int, float, complex, str, bytes, type(None), type(...))


@overload
def kernel(function: Function) -> Function: ...
@overload
def kernel(**options: Any) -> Callable[[Function], Function]: ...
def kernel(function: Any = None, **options: Any) -> Any:
    """Compile a function with numba when it is first called, without the GIL, and keep the result on disk.

    Args:
        function: The function, where this is used as a decorator without arguments.
        options: Further options of numba.njit, such as inline="always".
    """
    if function is None:
        return lambda decorated: Kernel(decorated, options)
    return Kernel(function, options)


class Kernel:
    """A function that numba compiles when it is first called, and takes for a dispatcher of its own."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self.py_func = function
        self._options = options

    @cached_property
    def _dispatcher(self) -> Any:
        import numba

        dispatcher = numba.njit(nogil=True, **self._options)(self.py_func)
        if hasattr(dispatcher, "_cache"):  # private in numba: without it every process compiles for itself
            dispatcher._cache = _KernelCache(dispatcher)
        # Private too: before it compiles numba imports what others register with it, which no kernel here needs, as all
        # of awkward, which comes with gigatoken.
        dispatcher._compilation_chain_init_hook = lambda: None
        return dispatcher

    def __call__(self, *arguments: Any) -> Any:
        return self._dispatcher(*arguments)

    def __getattr__(self, name: str) -> Any:  # such as _numba_type_, for the kernels that call this one
        return getattr(self._dispatcher, name)


class Instruction:
    """An instruction of the processor for kernels that numba has no function for: its `intrinsic`, made when needed.

    `definition` is what numba.extending.intrinsic takes: it returns the types of a call, and what writes LLVM's code.
    """

    def __init__(self, definition: Callable[..., Any]) -> None:
        update_wrapper(self, definition)
        self.py_func = definition
        self.targetoptions = dict[str, Any]()

    @cached_property
    def _numba_type_(self) -> Any:
        from numba.core.registry import cpu_target
        from numba.extending import intrinsic

        function = intrinsic(self.py_func)
        cpu_target.typing_context.refresh()
        return cpu_target.typing_context.resolve_value_type(function)

    def __call__(self, *_arguments: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} is for kernels alone")


@Instruction
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Begin to load `array[index]` into the processor's cache: prefetch(array, index).

    Kernels that look up many places of a large table do so for all of them first: unlike a load, which holds up those
    behind it, this waits for nothing.
    """
    from llvmlite import ir
    from numba.core import types

    def write_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = context.make_array(signature.args[0])(context, builder, arguments[0])
        number = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        index = context.cast(builder, arguments[1], signature.args[1], types.intp)
        offset = builder.mul(index, builder.extract_value(loaded.strides, 0))
        address = builder.gep(builder.bitcast(loaded.data, pointer), [offset])
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        # For reading, into all levels of the cache, data and no code.
        builder.call(instruction, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), write_code


def is_compiled(dispatcher: Any, *arguments: Any) -> bool:
    """Return whether this process or the cache has a kernel compiled for arguments of such types.

    Without such arguments: for some.
    """
    types = tuple(dispatcher.typeof_pyval(argument) for argument in arguments)
    if types in dispatcher.overloads or (not arguments and dispatcher.overloads):
        return True  # without asking LLVM, whose lock another thread may have held when this process was forked
    name = f"{kernel_name(dispatcher.py_func)}-{fingerprint(dispatcher)}"
    if arguments:
        name = _file_name(name, types, dispatcher.targetctx.codegen())
        return any((folder / name).is_file() for folder in cache_folders())
    return any(any(folder.glob(f"{name}-*{SUFFIX}")) for folder in cache_folders())


def note_compilation(dispatcher: Any, *arguments: Any, seconds: int, quiet: bool = False) -> None:
    """Print a note on standard error if a kernel and what it calls have to be compiled, in about `seconds`."""
    if not quiet and not is_compiled(dispatcher, *arguments):
        package = dispatcher.py_func.__module__.rpartition(".")[0]
        print(
            f"compiling the kernels of {package} (once per installation, about {seconds} s; `gristmill compile` "
            "compiles all) …",
            file=sys.stderr,
            flush=True,
        )


def cache_folders() -> Iterator[Path]:
    """Yield folders of compiled kernels: NUMBA_CACHE_DIR if it is set, else inside this package, and the user's cache.

    All are read; a kernel is written to the first that can be written.
    """
    installation = hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:16]
    import numba.core.config

    if configured := getattr(numba.core.config, "CACHE_DIR", ""):
        yield Path(configured) / f"gristmill-{installation}"
        return
    yield _PACKAGE / "__pycache__" / "kernels"
    with suppress(RuntimeError):  # a user without a home
        yield user_cache() / f"kernels-{installation}"


def kernel_name(function: Callable[..., Any]) -> str:
    """Return the name of a kernel in the cache: <module>.<function>."""
    return f"{function.__module__}.{function.__qualname__}".replace("<locals>", "locals")


def fingerprint(dispatcher: Any) -> str:
    """Hash of everything that is compiled into a kernel, except the types of its arguments: 16 hexadecimal digits.

    Raises TypeError if the kernel uses a global that this cannot hash.
    """
    import numba

    versions = (sys.version_info[:3], numba.__version__, np.__version__)
    seen = dict[int, int]()
    return hashlib.sha256(repr((versions, _describe(dispatcher, seen))).encode()).hexdigest()[:16]


def _describe(value: Any, seen: dict[int, int]) -> Any:
    """Return a kernel, or a value that a kernel uses, in terms whose repr tells it from any other."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return type(value).__qualname__, [_describe(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return "set", sorted(repr(_describe(item, seen)) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        return "array", str(value.dtype), np.shape(value), hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_names, [_describe(item, seen) for item in value.co_consts]
    if hasattr(value, "py_func"):
        return _describe_kernel(value, seen)
    if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType | np.ufunc):
        return type(value).__name__, getattr(value, "__module__", None), value.__name__
    if isinstance(value, types.FunctionType):  # numba knows it by name, or calls it for a type
        return _describe(value.__code__, seen)
    raise TypeError(f"a kernel uses {value!r}: expected a number, string, array, tuple, type, module or kernel")


def _describe_kernel(dispatcher: Any, seen: dict[int, int]) -> Any:
    function = dispatcher.py_func
    if id(function) in seen:
        return "seen", seen[id(function)]
    seen[id(function)] = len(seen)
    code = function.__code__
    is_documented = isinstance(function.__doc__, str)
    constants = [_describe(item, seen) for item in code.co_consts[is_documented:]]
    cells = [_describe(cell.cell_contents, seen) for cell in function.__closure__ or ()]
    names = [name for name in code.co_names if name in function.__globals__]
    values = [_describe(function.__globals__[name], seen) for name in names]
    options = list[tuple[str, str]]()
    for name, option in sorted(dispatcher.targetoptions.items()):
        options.append((name, repr(_describe(option, seen))))
    return kernel_name(function), code.co_code, code.co_names, constants, cells, names, values, options


class _KernelCache:
    """The cache of one kernel, in place of numba's."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self._name = kernel_name(dispatcher.py_func)
        self.cache_path = str(next(cache_folders()))

    def enable(self) -> None:
        pass

    disable = flush = enable

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._dispatcher)  # when it is first called: all globals of its module are defined by then

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Read the kernel for a signature; None if it is not in the cache, or cannot be read."""
        from numba.core.compiler import CompileResult
        from numba.core.runtime import rtsys

        rtsys.initialize(target)  # numba's own cache calls target.refresh(): a second of imports, for compiling alone
        name = self._file_name(signature, target.codegen())
        overload = None
        for folder in cache_folders():
            try:
                overload = CompileResult._rebuild(target, *pickle.loads((folder / name).read_bytes()))
                break
            except Exception:  # not there, damaged, or written by an unreleased numba: it is compiled again
                continue
        return overload

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Write a compiled kernel to the first folder that can be written, and remove its outdated versions."""
        if any(not lifted.can_cache for lifted in compiled.lifted) or compiled.library.has_dynamic_globals:
            return
        from numba.core.serialize import dumps

        name = self._file_name(signature, compiled.codegen)
        data = dumps(compiled._reduce())
        for folder in cache_folders():
            try:
                _write(folder, name, data)
                self._remove_outdated(folder)
                return
            except OSError:
                continue

    def _file_name(self, signature: Any, codegen: Any) -> str:
        return _file_name(f"{self._name}-{self._fingerprint}", signature, codegen)

    def _remove_outdated(self, folder: Path) -> None:
        for path in folder.glob(f"{self._name}-*"):
            if not path.name.startswith(f"{self._name}-{self._fingerprint}-"):
                path.unlink(missing_ok=True)


def _file_name(name: str, signature: Any, codegen: Any) -> str:
    types = [(str(item), getattr(item, "fields", ())) for item in getattr(signature, "args", signature)]
    key = hashlib.sha256(repr((types, codegen.magic_tuple())).encode()).hexdigest()[:16]
    return f"{name}-{key}{SUFFIX}"


def _write(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}.{uuid4().hex}.tmp"
    try:
        temporary.write_bytes(data)
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
