"""What calls would have Triton compile, found without compiling or launching anything.

Inside a `Listing` this thread's launches are passed over. Triton is asked, once for each kind of launch, for the kernel
as if to compile it; just before it begins it calls a hook, which has its own description of the kernel and tells it to
leave it at that. Launches leave nothing behind: no launcher, no repetition and no count in a workspace. PyTorch's own
kernels do run, on what those passed over did not write, so all new memory is zeros: an index 0 exists, and chance may not.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack.contract import launch as launching
from tilestack.contract.descriptors import Tile
from tilestack.contract.repeat import ALLOCATIONS

log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()  # all of a process share the hook and the launchers


class Wanted(NamedTuple):
    """A kernel to be compiled, in words that another process understands."""

    module: str
    name: str
    target: tuple[str, int, int]  # Triton's backend, the architecture and the threads of a warp
    description: str  # Triton's own: signature, constants and options, which `JITFunction.preload` takes
    digest: str  # by which Triton's cache finds the binary; empty where we could not tell


class Listing(TorchDispatchMode):
    """`with Listing() as listed:` fills `listed.missing` with the kernels that are not compiled yet, in the order of their
    first launch, and tells `found` of each."""

    def __init__(self, found: Callable[[Wanted], None] = lambda wanted: None):
        super().__init__()
        self.found = found
        self.missing: list[Wanted] = []
        self.described: set[tuple] = set()
        self.kinds: set[tuple] = set()  # of launches that Triton was asked about

    def __enter__(self) -> "Listing":
        from triton import knobs

        _one_at_a_time.acquire()
        self.active = True
        self.thread, self.replaced = threading.get_ident(), knobs.runtime.jit_cache_hook
        self.launchers, self.write_launcher = launching._launchers, launching.write_launcher
        knobs.runtime.jit_cache_hook = self.note
        launching._launchers, launching.write_launcher = {}, self.passing_over
        launching.notes[self.thread] = []  # repeated calls go their own way, past `launch`, and none is noted
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        from triton import knobs

        super().__exit__(*problem)
        del launching.notes[self.thread]
        launching._launchers, launching.write_launcher = self.launchers, self.write_launcher
        knobs.runtime.jit_cache_hook = self.replaced
        self.active = False
        _one_at_a_time.release()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in ALLOCATIONS else out

    def passing_over(self, kernel: Any) -> Callable:
        """What `launch` calls for a kernel; launches of other threads are made, and of all who keep this for longer."""
        launch_it: Callable | None = None

        def launcher(grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
            nonlocal launch_it
            if self.active and threading.get_ident() == self.thread:
                return self.ask(kernel, grid, arguments, options)
            launch_it = launch_it or self.write_launcher(kernel)
            return launch_it(grid, *arguments, **options)

        return launcher

    def ask(self, kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> None:
        """Ask Triton for the kernel of a launch, unless it was asked for the like of it."""
        first = arguments[0].tensor if isinstance(arguments[0], Tile) else arguments[0]
        specialised = tuple(map(launching.specialisation, kernel.arg_names, arguments))
        kind = (id(kernel), first.get_device(), specialised, tuple(options.items()))
        if kind in self.kinds:
            return
        self.kinds.add(kind)
        given = {name: value for name, value in options.items() if value is not None or name in kernel.arg_names}
        values = [a.descriptor() if isinstance(a, Tile) else a for a in arguments]
        with torch.cuda.device(first.get_device()):
            try:
                kernel.warmup(*values, grid=grid, **given)
            except Exception:  # of a Triton that does it otherwise; an error of the kernel's own comes with its launch
                log.debug("cannot list %s", kernel, exc_info=True)

    def note(self, *, key: Any, fn: Any, compile: dict[str, Any], **more: Any) -> bool:
        """What Triton asks before it compiles a kernel; True has it pass over the launch."""
        if threading.get_ident() != self.thread:
            return bool(self.replaced and self.replaced(key=key, fn=fn, compile=compile, **more))
        kernel, described = fn.jit_function, (fn.module, fn.name, compile["device"], str(key))
        if described in self.described:
            return True
        self.described.add(described)
        if fn.module != "__main__" and "<locals>" not in fn.name:  # which no other process could import
            target = kernel.device_caches[compile["device"]][2]
            about = target.backend, target.arch, target.warp_size
            digest = digest_of(kernel, compile)
            if not (digest and in_cache(digest, kernel.__name__)):
                wanted = Wanted(fn.module, fn.name, about, compile["specialization_data"], digest)
                self.missing.append(wanted)
                self.found(wanted)
        return True


def digest_of(kernel: Any, compile: dict[str, Any]) -> str:
    """The name under which Triton's cache on disk keeps a kernel, as `triton.compile` makes it; empty where this Triton does
    that in another way."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.runtime.cache import get_cache_key

        backend = kernel.device_caches[compile["device"]][3]
        options = json.loads(compile["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        source = kernel.ASTSource(kernel, compile["signature"], compile["constants"], compile["configs"][0])
        key = get_cache_key(source, backend, backend.parse_options(options), get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()
    except Exception:
        log.debug("cannot tell whether %s is compiled", kernel, exc_info=True)
        forget_hashes(kernel)
        return ""


def forget_hashes(function: Any) -> None:
    """Undo what a failure to hash a kernel's source leaves behind: placeholders, which Triton would take for hashes."""
    from triton.runtime.jit import JITCallable

    if str(function.hash).startswith("recursion:"):
        function.hash = None
        for used in function.get_capture_scope().values():
            if isinstance(used, JITCallable):
                forget_hashes(used)


def in_cache(digest: str, name: str) -> bool:
    from triton.runtime.cache import get_cache_manager

    metadata = f"{name[:150]}.json"  # as Triton cuts it
    return metadata in (get_cache_manager(digest).get_group(metadata) or {})
