"""Collectives between the tensor- and pipeline-parallel ranks of a model, and between expert-parallel ranks.

Every rank makes all scheduling and cache decisions itself. At the start, ranks exchange their settings and memory
sizes; in each step, they exchange sampled tokens, and errors if there are any. All methods of `Ranks` and `ExpertPeers`
are collective: all ranks must call them in the same order.
"""

import builtins
import importlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

_PACKAGE = __name__.partition(".")[0]
_MOST_CAUSES = 8


class _Content(NamedTuple):
    """Data from which other ranks rebuild an error: arguments for its builtin base class, and its attributes."""

    args: tuple[Any, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RaisedError:
    """Picklable description of an error that one rank raised, so that all ranks can raise it.

    Args:
        module, name: Module and name of the error's type.
        message: Text of the error.
        content: Pickled `_Content`; None if the error cannot be rebuilt from such data.
        cause: Description of the error's `__cause__`; None if it has none.
    """

    module: str
    name: str
    message: str
    content: bytes | None
    cause: "RaisedError | None" = None

    @staticmethod
    def of(error: BaseException, most_causes: int = _MOST_CAUSES) -> "RaisedError":
        """Describe an error, and up to `most_causes` errors in its chain of causes."""
        kind, message = type(error), _text_of(error)
        cause = None
        if error.__cause__ is not None and most_causes:
            cause = RaisedError.of(error.__cause__, most_causes - 1)
        return RaisedError(kind.__module__, kind.__qualname__, message, _content_of(error, message), cause)

    def rebuilt(self) -> Exception | None:
        """Return an equal error of the original type; None if it cannot be rebuilt on this rank."""
        error = None
        with suppress(Exception):  # a type or attribute from another rank may raise any error
            if self.content is not None:
                error = _rebuilt(_type_of(self.module, self.name), pickle.loads(self.content))
        if not isinstance(error, Exception) or _text_of(error) != self.message:
            return None
        return self._with_cause(error)

    def renamed(self) -> RuntimeError:
        """Return a `RuntimeError` whose message names the original type and has the original text."""
        name = self.name if self.module == builtins.__name__ else f"{self.module}.{self.name}"
        error = RuntimeError(f"{name}: {self.message}" if self.message else name)
        self._with_cause(error)
        return error

    def _with_cause(self, error: Exception) -> Exception:
        if self.cause is not None:
            error.__cause__ = self.cause.rebuilt() or self.cause.renamed()
        return error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(str() of the error raised another error)"


def _type_of(module: str, name: str) -> type:
    """Return a type of this package or of Python's builtins; raise `LookupError` for types of other packages."""
    if module.partition(".")[0] not in (_PACKAGE, builtins.__name__):
        raise LookupError(f"{module}.{name} is neither a builtin nor in this package")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _content_of(error: BaseException, message: str) -> bytes | None:
    """Return the pickled `_Content` of an error; None if an equal error cannot be rebuilt from it."""
    with suppress(Exception):
        kind = _type_of(type(error).__module__, type(error).__qualname__)
        reduced: tuple[Any, ...] = tuple(_builtin_base(kind).__reduce__(error))  # (type, args) or (type, args, state)
        args, state = reduced[1], reduced[2] if len(reduced) > 2 else {}
        attributes = {name: value for name, value in state.items() if _is_picklable(value)}
        for tried in (args, (message,)):
            packed = _packed(tried)
            if kind is type(error) and _is_picklable(packed):
                content = pickle.dumps(_Content(packed, attributes))
                if str(_rebuilt(kind, pickle.loads(content))) == message:
                    return content
    return None


def _is_picklable(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def _rebuilt(kind: type, content: _Content) -> BaseException:
    """Create an error without its own constructor, whose arguments may differ from those of the builtin base."""
    base, args = _builtin_base(kind), _unpacked(content.args)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    error.__setstate__(content.attributes)
    return error


def _packed(value: Any) -> Any:
    """Convert errors inside an argument to `RaisedError`s, as exception groups require."""
    if isinstance(value, BaseException):
        return RaisedError.of(value)
    return type(value)(map(_packed, value)) if type(value) in (list, tuple) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, RaisedError):
        return value.rebuilt() or value.renamed()
    return type(value)(map(_unpacked, value)) if type(value) in (list, tuple) else value


def _builtin_base(kind: type) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == builtins.__name__)


Result = TypeVar("Result")


class Ranks(Protocol):
    """Interface for collectives between all tensor- and pipeline-parallel ranks of a model."""

    num_ranks: int
    index: int
    num_stages: int
    is_first_stage: bool
    is_last_stage: bool

    def gather(self, value: Any) -> list[Any]:
        """Return one picklable value from each rank, ordered by pipeline stage, then by tensor-parallel rank."""

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over all ranks of a list of 64-bit integers."""

    def all_hold(self, holds: bool) -> bool:
        """Return True if `holds` is True on all ranks."""

    def from_source(self, tensor: Tensor) -> Tensor:
        """Broadcast a tensor in place from the first rank of the last pipeline stage, and return it.

        With NCCL, this is CUDA-graph safe and does not wait for the device.
        """


class OneRank:
    """Implementation of `Ranks` for a model on a single rank."""

    num_ranks = 1
    index = 0
    is_first_stage = is_last_stage = True
    num_stages = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def least(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def all_hold(self, holds: bool) -> bool:
        return holds

    def from_source(self, tensor: Tensor) -> Tensor:
        return tensor


def on_all_ranks(ranks: Ranks, compute: Callable[[], Result]) -> Result:
    """Run `compute` on each rank and return its result; if it raises on any rank, raise the same error on all ranks.

    Raises:
        Exception: Error of the first rank that failed. Unless all ranks raised the same error, a note names the rank.
            If another rank cannot rebuild the error, for instance because its type is from another package, a
            `RuntimeError` that names the type is raised instead.
    """
    error: Exception | None = None
    try:
        result = compute()
    except Exception as found:
        error = found
    if ranks.num_ranks == 1:
        if error is not None:
            raise error
        return result
    raised = ranks.gather(None if error is None else RaisedError.of(error))
    failed = next((rank for rank, found in enumerate(raised) if found is not None), None)
    if failed is None:
        return result
    shared = _shared_error(ranks, failed, raised[failed], error)
    if any(found != raised[failed] for found in raised):
        shared.add_note(f"raised on rank {failed} of the model")
    raise shared


def _shared_error(ranks: Ranks, failed: int, raised: RaisedError, mine: Exception | None) -> Exception:
    """Return the error that this rank raises because rank `failed` raised; all ranks must call this function."""
    shared = raised.rebuilt()
    is_known = ranks.all_hold(shared is not None)
    if shared is None or not is_known:
        shared = raised.renamed()
    if ranks.index == failed and mine is not None:
        if is_known:
            shared = mine
        else:
            shared.__cause__ = mine
    return shared


class ExpertPeers(Protocol):
    """Interface for collectives between expert-parallel ranks.

    Each rank has its own requests, but all ranks run each step together.
    """

    num_ranks: int

    def greatest(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks of a list of 64-bit integers; does not wait for the device."""


class NoPeers:
    """Implementation of `ExpertPeers` without expert parallelism."""

    num_ranks = 1

    def greatest(self, values: Sequence[int]) -> list[int]:
        return list(values)
