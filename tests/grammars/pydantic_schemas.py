"""Random pydantic models, to test the schemas that pydantic generates from them."""

# ruff: noqa: UP045  # kinds that are values can only be made optional so

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from random import Random
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, create_model

NAMES = ("name", "size", "tags", "parent", "score", "when", "options", "kind_of", "items", "label", "größe", "ratio")


class Color(Enum):
    """Enum of strings."""

    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class Level(int, Enum):
    """Enum of numbers."""

    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    """Member of a discriminated union, whose tag has a default value."""

    kind: Literal["cat"] = "cat"
    lives: int = Field(default=9, ge=0, le=9)


class Dog(BaseModel):
    """Second member of the discriminated union."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["dog"]
    breed: Optional[str] = None


class Tree(BaseModel):
    """A model that refers to itself."""

    label: str = Field(max_length=12)
    children: list["Tree"] = Field(default_factory=list, max_length=3)
    parent: Optional["Tree"] = None


class Text(BaseModel):
    """Leaf of an expression tree."""

    op: Literal["text"]
    value: str


class Join(BaseModel):
    """Inner node of an expression tree; its children are leaves or inner nodes."""

    op: Literal["join"] = "join"
    parts: list[Annotated["Text | Join", Field(discriminator="op")]] = Field(max_length=2)


_SCALARS: tuple[Any, ...] = (
    str, int, float, bool, date, datetime, time, timedelta, UUID, AnyUrl, Decimal, Any, Color, Level,
    Literal["a", "b", 3], Literal["only"],
    Annotated[str, Field(min_length=2, max_length=20)],
    Annotated[str, Field(pattern=r"^[a-z]{2}(-[A-Z]{2})?$")],
    Annotated[int, Field(ge=1, lt=1000)],
    Annotated[int, Field(multiple_of=4)],
    Annotated[float, Field(gt=0, le=1)],
)  # fmt: skip
_MODELS: tuple[Any, ...] = (Cat, Dog, Tree, Text, Join)
_KEYS: tuple[Any, ...] = (str, int, UUID, Color, Literal["x", "y"], Annotated[str, Field(pattern="^k")])
_DEPTH = 2


def random_model(random: Random) -> type[BaseModel]:
    """Return a random model with 1 to 9 fields."""
    fields: dict[str, Any] = {}
    for name in random.sample(NAMES, random.randint(1, 9)):
        kind = _kind(random, _DEPTH)
        settings: dict[str, Any] = {"description": f"The {name}."} if random.random() < 0.5 else {}
        default: dict[str, Any] = {"default": None} if random.random() < 0.4 else {}
        fields[name] = (Optional[kind] if default else kind, Field(**settings, **default))
    config = ConfigDict(extra=random.choice(["ignore", "forbid", "allow"]))
    return create_model(f"Model{random.randrange(1000)}", __config__=config, **fields)


def _kind(random: Random, depth: int) -> Any:
    if depth == 0 or random.random() < 0.4:
        return random.choice(_SCALARS)
    inner = _kind(random, depth - 1)
    kinds: list[Any] = [
        *_MODELS,
        list[inner],
        Annotated[list[inner], Field(min_length=1, max_length=3)],
        Optional[inner],
        dict[random.choice(_KEYS), inner],
        tuple[inner, int],
        tuple[str, ...],
        set[Color],
        frozenset[random.choice([bool, str])],
        Annotated[Cat | Dog, Field(discriminator="kind")],
        inner | Tree if isinstance(inner, type) else Optional[inner],
        create_model(f"Inner{random.randrange(1000)}", first=(inner, ...), second=(Optional[inner], None)),
    ]
    return random.choice(kinds)
