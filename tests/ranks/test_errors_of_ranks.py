"""An error of one rank is the same error on all of them, for any constructor of its type."""

import builtins
import inspect
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache import errors
from megatron_mamba_cache.command_line.expected_memory import errors_of_settings
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.errors import CacheBudgetError, CacheCapacityError, HostBudgetError
from megatron_mamba_cache.installation import MissingExtraError
from megatron_mamba_cache.ranks.group import OneRank, on_all_ranks

NUM_RANKS, FAILING = 3, 1
OWN = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
EXAMPLES = {"float": 1.5, "int": 3, "str": "text", "bool": True}
"""Arguments by the annotation of a constructor's parameter."""


class Exchange:
    """Values that threads acting as ranks exchange, pickled as between processes."""

    def __init__(self) -> None:
        self.values: list[bytes] = [b""] * NUM_RANKS
        self.barrier = threading.Barrier(NUM_RANKS, timeout=20)

    def all_values(self, index: int, value: Any) -> list[Any]:
        self.values[index] = pickle.dumps(value)
        self.barrier.wait()
        found = [pickle.loads(one) for one in self.values]
        self.barrier.wait()
        return found


class ThreadRank(OneRank):
    """One of several ranks, each in a thread."""

    num_ranks = NUM_RANKS

    def __init__(self, exchange: Exchange, index: int) -> None:
        self.index = index
        self._exchange = exchange

    def gather(self, value: Any) -> list[Any]:
        return self._exchange.all_values(self.index, value)

    def all_hold(self, holds: bool) -> bool:
        return all(self.gather(holds))


def raised_by_all(*raised: Exception | None) -> list[Exception]:
    """Return the errors raised on each rank if these ranks raise their own ones."""
    exchange = Exchange()

    def run(index: int) -> Exception:
        def compute() -> None:
            error = raised[index]
            if error is not None:
                raise error

        with pytest.raises(Exception) as found:
            on_all_ranks(ThreadRank(exchange, index), compute)
        return found.value

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(run, range(NUM_RANKS)))


def raised_by_one(error: Exception) -> list[Exception]:
    return raised_by_all(*(error if index == FAILING else None for index in range(NUM_RANKS)))


def example_of(kind: type[Exception]) -> Exception:
    """Return an error of a type, made with an example of each parameter of its constructor."""
    if kind.__init__ in (base.__init__ for base in vars(builtins).values() if isinstance(base, type)):
        return kind("what was needed, what was found")
    parameters = inspect.signature(kind).parameters.values()
    by_position = [EXAMPLES[one.annotation.__name__] for one in parameters if one.kind is not one.KEYWORD_ONLY]
    by_name = {one.name: EXAMPLES[one.annotation.__name__] for one in parameters if one.kind is one.KEYWORD_ONLY}
    return kind(*by_position, **by_name)


def caught(act: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as found:
        act()
    return found.value


def with_attributes(error: Exception, **attributes: Any) -> Exception:
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def from_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class ForeignError(ValueError):
    """An error of another package whose constructor needs two numbers."""

    def __init__(self, needed: int, found: int) -> None:
        super().__init__(f"{needed} needed, {found} found")


class EmptyError(ValueError):
    """An exception that is falsy."""

    def __len__(self) -> int:
        return 0


class UnprintableError(RuntimeError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


BUILTIN = {
    "without arguments": lambda: NotImplementedError(),
    "with a key": lambda: caught(lambda: {}["missing"]),
    "of the system": lambda: caught(lambda: Path("/nowhere/at/all").read_text()),
    "of a codec": lambda: caught(lambda: "é".encode("ascii")),
    "of an import": lambda: caught(lambda: __import__("no_such_module")),
    "of memory": lambda: MemoryError(),
    "of syntax": lambda: SyntaxError("bad", ("file", 1, 2, "text")),
    "a group": lambda: ExceptionGroup("two", [example_of(CacheBudgetError), KeyError("b")]),
    "with an argument that cannot be pickled": lambda: ValueError(threading.Lock()),
    "of an own module": lambda: MissingExtraError("install it", name="extra"),
}


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_every_package_error_on_one_rank_is_raised_equally_on_all_ranks(kind: type[Exception]) -> None:
    error = example_of(kind)
    found = raised_by_one(error)
    assert [(type(one), str(one)) for one in found] == [(kind, str(error))] * NUM_RANKS
    attributes = [{name: value for name, value in vars(one).items() if name != "__notes__"} for one in found]
    assert attributes == [attributes[FAILING]] * NUM_RANKS and str(error)
    assert all(one.__notes__ == [f"raised on rank {FAILING} of the model"] for one in found)
    assert found[FAILING] is error


def test_error_raised_on_all_ranks_names_no_rank() -> None:
    same = raised_by_all(*(CacheBudgetError(1.0, 2.0, 3) for _ in range(NUM_RANKS)))
    assert not any(hasattr(one, "__notes__") for one in same)
    differ = raised_by_all(*(CacheBudgetError(1.0, 2.0 + index, 3) for index in range(NUM_RANKS)))
    assert all(one.__notes__ == ["raised on rank 0 of the model"] for one in differ)


def test_command_line_error_names_the_failing_rank() -> None:
    for error in (CacheBudgetError(1.0, 2.0, 3), CacheCapacityError("no room"), ValueError("cache_gb is bad")):
        for one in raised_by_one(error):
            with pytest.raises(UsageError) as found, errors_of_settings(0.5):
                raise one
            assert str(found.value).endswith(" (raised on rank 1 of the model)")


def test_budget_error_with_a_draft_model_is_raised_on_each_rank() -> None:
    assert {CacheBudgetError, HostBudgetError, CacheCapacityError} < set(OWN)
    error = CacheBudgetError(1.0, 2.0, 3)
    found = [one.of_whole(0.5) for one in raised_by_one(error) if isinstance(one, CacheBudgetError)]
    assert [str(one) for one in found] == [str(error.of_whole(0.5))] * NUM_RANKS


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_error_on_one_rank_is_raised_equally_on_all_ranks(name: str) -> None:
    error = BUILTIN[name]()
    found = raised_by_one(error)
    assert [(type(one), str(one)) for one in found] == [(type(error), str(error))] * NUM_RANKS


def test_picklable_attributes_of_an_error_are_transferred() -> None:
    error = with_attributes(ValueError("full"), found_gb=1.5, lock=threading.Lock(), source=lambda: None)
    for index, one in enumerate(raised_by_one(error)):
        assert one.found_gb == 1.5 and hasattr(one, "lock") == (index == FAILING)  # type: ignore[attr-defined]


def test_cause_of_an_error_is_transferred() -> None:
    inner = from_cause(HostBudgetError(3.0, 2**30), KeyError("free"))
    for one in raised_by_one(from_cause(CacheCapacityError("no room"), inner)):
        assert type(one) is CacheCapacityError and str(one) == "no room"
        assert type(one.__cause__) is HostBudgetError and str(one.__cause__) == str(inner)
        assert type(one.__cause__.__cause__) is KeyError
    for one in raised_by_one(from_cause(ValueError("outer"), ForeignError(2, 1))):
        assert str(one) == "outer" and "ForeignError" in repr(one.__cause__)
    for one in raised_by_one(from_cause(ValueError("outer"), EmptyError("no entries"))):
        assert "EmptyError" in repr(one.__cause__)


@pytest.mark.parametrize(
    "make",
    [lambda: ForeignError(4, 2), UnprintableError, lambda: type("LocalError", (RuntimeError,), {})("here alone")],
    ids=["of another package", "without a text", "made in a function"],
)
def test_error_that_cannot_be_rebuilt_becomes_a_runtime_error_with_its_type(make: Callable[[], Exception]) -> None:
    error = make()
    found = raised_by_one(error)
    assert {type(one) for one in found} == {RuntimeError} and len({str(one) for one in found}) == 1
    assert type(error).__name__ in str(found[0])
    assert found[FAILING].__cause__ is error


def test_error_type_missing_on_one_rank_becomes_a_runtime_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewError(ValueError):
        pass

    NewError.__module__, NewError.__qualname__ = errors.__name__, "NewError"
    monkeypatch.setattr(errors, "NewError", NewError, raising=False)
    assert {type(one) for one in raised_by_one(NewError("new"))} == {NewError}
    original = ThreadRank.all_hold

    def holds(self: ThreadRank, found: bool) -> bool:
        return original(self, found and self.index != 2)

    monkeypatch.setattr(ThreadRank, "all_hold", holds)
    found = raised_by_one(NewError("new"))
    assert [(type(one), str(one)) for one in found] == [(RuntimeError, f"{errors.__name__}.NewError: new")] * NUM_RANKS


def test_error_of_the_first_rank_is_raised_when_errors_differ() -> None:
    found = raised_by_all(None, CacheBudgetError(1.0, 2.0, 3), TypeError("later"))
    assert {(type(one), str(one)) for one in found} == {(CacheBudgetError, str(CacheBudgetError(1.0, 2.0, 3)))}


def test_single_rank_raises_its_own_error_unchanged() -> None:
    error = ForeignError(1, 2)

    def fail() -> None:
        raise error

    with pytest.raises(ForeignError) as found:
        on_all_ranks(OneRank(), fail)
    assert found.value is error and not hasattr(error, "__notes__")
