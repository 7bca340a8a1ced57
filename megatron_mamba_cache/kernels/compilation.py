"""Count what Triton compiles in this process, and the seconds it takes, and log compilations that take long.

Triton, Gluon included, compiles a kernel when it is first launched with arguments of some types, alignments and
constants, and calls hooks before and after. The hooks are also called for a kernel in Triton's disk cache, which takes
milliseconds. The interpreter compiles nothing.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, local
from typing import Any

from triton import knobs

from .progress import ProgressLine

_Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Compilations:
    """Kernels that were compiled, and the seconds in which any was, until it was loaded."""

    num_kernels: int = 0
    seconds: float = 0.0

    def since(self, earlier: "Compilations") -> "Compilations":
        """Return what was compiled after `earlier`."""
        return Compilations(self.num_kernels - earlier.num_kernels, self.seconds - earlier.seconds)


class CompilationWatch:
    """Counts compilations through Triton's hooks, and calls the hooks that were installed before."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._total = Compilations()
        self._running: dict[Hashable, tuple[float, ProgressLine]] = {}
        self._thread = local()
        self._hooks: tuple[_Hook | None, _Hook | None] = (None, None)

    @property
    def total(self) -> Compilations:
        """What was compiled while the hooks were installed."""
        return self._total

    def install(self) -> None:
        """Install the hooks; where others have replaced them since, install them again in front."""
        runtime = knobs.runtime
        before, after = self._hooks
        if before is None or runtime.jit_cache_hook is not before:
            before = runtime.jit_cache_hook = self._before(runtime.jit_cache_hook)
        if after is None or runtime.jit_post_compile_hook is not after:
            after = runtime.jit_post_compile_hook = self._after(runtime.jit_post_compile_hook)
        self._hooks = before, after
        runtime.kernel_load_end_hook.add(self._note_load)

    @contextmanager
    def compiling_ahead(self) -> Iterator[None]:
        """Count the kernels that the block's thread lets others compile, but not the time; see `add_seconds`."""
        self._thread.ahead = set()
        try:
            yield
        finally:
            self._thread.ahead = None

    def add_seconds(self, seconds: float) -> None:
        """Count time that other threads took to compile."""
        with self._lock:
            self._add(0, seconds)

    @property
    def _ahead(self) -> set[Hashable] | None:
        """The kernels that are being compiled for this thread in others; None: it compiles them itself."""
        ahead: set[Hashable] | None = getattr(self._thread, "ahead", None)
        return ahead

    def _before(self, previous: _Hook | None) -> _Hook:
        def hook(**event: Any) -> Any:
            is_refused = previous(**event) if previous is not None else None
            if not is_refused and self._ahead is not None:
                self._ahead.add(_identity(event))
            elif not is_refused:
                self._begin(_identity(event), event["fn"].name)
            return is_refused

        return hook

    def _after(self, previous: _Hook | None) -> _Hook:
        def hook(**event: Any) -> Any:
            self._end(_identity(event), is_launched=not event["is_manual_warmup"])
            return previous(**event) if previous is not None else None

        return hook

    def _begin(self, identity: Hashable, name: str) -> None:
        self._thread.compiled_at = None
        with self._lock:
            for _, failed in self._running.values():  # no hook reports a failed compilation
                failed.end()
            line = ProgressLine(f"Triton compiles {name} at its first use, which it does once on a machine")
            self._running[identity] = time.perf_counter(), line

    def _end(self, identity: Hashable, *, is_launched: bool) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._ahead is not None and identity in self._ahead:
                self._ahead.remove(identity)
                self._add(1, 0)
                return
            running = self._running.pop(identity, None)
            if running is None:  # hooks that were chained twice
                return
            began, line = running
            line.end()
            self._add(1, now - began)
        self._thread.compiled_at = now if is_launched else None

    def _note_load(self, *_: object) -> None:
        """Count the time until a kernel is loaded, during which some versions of Triton compile its launcher."""
        compiled_at = getattr(self._thread, "compiled_at", None)
        self._thread.compiled_at = None
        if compiled_at is not None:
            with self._lock:
                self._add(0, time.perf_counter() - compiled_at)

    def _add(self, num_kernels: int, seconds: float) -> None:
        self._total = Compilations(self._total.num_kernels + num_kernels, self._total.seconds + seconds)


def _identity(event: dict[str, Any]) -> Hashable:
    return event["fn"].module, event["fn"].name, event["key"]


WATCH = CompilationWatch()
"""The watch of this process; installed when a model is prepared for serving."""
