"""Map checkpoint tensors to the parameters of a Megatron model, and select the shard for a rank."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from ..mcore.linear import QuantizableLinear
from ..mcore.stacked_experts import StackedExperts


@dataclass(frozen=True, slots=True)
class Split:
    """Split of a checkpoint tensor over tensor-parallel ranks.

    Args:
        dim: The dimension that is split; None if every rank keeps the whole tensor.
        sections: Lengths, along `dim`, of sections that are split separately; empty if there is only one section.
    """

    dim: int | None = None
    sections: tuple[int, ...] = ()

    def local(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """Return the shard of the tensor for a rank; `size` is the number of ranks.

        Raises:
            ValueError: If the lengths of the sections do not add up, or one is not divisible by the number of ranks.
        """
        if self.dim is None or size == 1:
            return tensor
        length = tensor.shape[self.dim]
        if self.sections and sum(self.sections) != length:
            raise ValueError(
                f"dimension {self.dim} has size {length}, which is not the sum of its sections {list(self.sections)}"
            )
        parts = tensor.split(self.sections or length, dim=self.dim)
        if any(part.shape[self.dim] % size for part in parts):
            lengths = [part.shape[self.dim] for part in parts]
            raise ValueError(f"sections of lengths {lengths} are not divisible by {size} ranks")
        return torch.cat([part.chunk(size, dim=self.dim)[rank] for part in parts], dim=self.dim)


@dataclass(frozen=True, slots=True)
class GroupedSplit:
    """Split of a tensor whose rows are grouped by KV head, over tensor-parallel ranks.

    The groups are divided among the ranks. If there are more ranks than groups, consecutive ranks share a group.

    Args:
        num_groups: Number of groups, all of equal length along dimension 0.
        divided: Lengths of the sections at the start of a group that are divided among the ranks that share the group.
            Each of these ranks keeps all remaining rows of the group.
    """

    num_groups: int
    divided: tuple[int, ...] = ()

    def local(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """Return the shard of the tensor for a rank; `size` is the number of ranks.

        Raises:
            ValueError: If the number of rows is not divisible by the number of groups, or if neither the number of
                groups nor the number of ranks divides the other.
        """
        if size <= self.num_groups:
            return Split(0).local(tensor, rank, size)
        if len(tensor) % self.num_groups or size % self.num_groups:
            raise ValueError(
                f"{len(tensor)} rows, grouped by {self.num_groups} KV heads, are not divisible by {size} ranks"
            )
        num_sharing = size // self.num_groups
        group = tensor.chunk(self.num_groups)[rank // num_sharing]
        *parts, rest = group.split((*self.divided, len(group) - sum(self.divided)))
        return torch.cat([*(part.chunk(num_sharing)[rank % num_sharing] for part in parts), rest])


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """One destination of a checkpoint tensor.

    Args:
        target: Name of a Megatron parameter or buffer.
        split: Split of the selected rows over tensor-parallel ranks.
        entry: Index of the tensor in a stack; None if the checkpoint tensor is not a stack.
        rows: Selects the rows of the tensor, or of the stack's entry, that are copied to the target.
        view: Returns the view of a rank's target into which the rows are copied.
    """

    target: str
    split: Split | GroupedSplit = Split()
    entry: int | None = None
    rows: Callable[[Tensor], Tensor] = _whole
    view: Callable[[Tensor], Tensor] = _whole

    def select(self, tensor: Tensor) -> Tensor:
        """Return the part of a checkpoint tensor that is copied to this destination, before it is split over ranks."""
        return self.rows(tensor if self.entry is None else tensor[self.entry])

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the part that `select` returns, given the undivided model's parameter shapes, by name."""
        return _needed_shape(self.view(torch.empty(shapes[self.target], device="meta")))


Placements = Mapping[str, tuple[Placement, ...]]
"""Checkpoint tensor name → its destinations."""


def stacked(targets: Iterable[Placement]) -> tuple[Placement, ...]:
    """Return the destinations of a stack of tensors, given the destinations of the stacked tensors, in order.

    Consecutive tensors with the same target, such as the halves of a gated projection, form one entry of the stack;
    each has an equal share of the entry's rows.
    """
    entries = [list(parts) for _, parts in groupby(targets, key=lambda placement: placement.target)]

    def share(part: int, count: int) -> Callable[[Tensor], Tensor]:
        return lambda entry: entry.chunk(count)[part]

    return tuple(
        replace(placement, entry=index, rows=share(part, len(entry)))
        for index, entry in enumerate(entries)
        for part, placement in enumerate(entry)
    )


def stored_shape(targets: tuple[Placement, ...], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that a checkpoint tensor must have, given its destinations.

    Args:
        shapes: Shapes of the parameters and buffers in the undivided model, by name.
    """
    first = targets[0].entry
    parts = [placement.shape(shapes) for placement in targets if placement.entry == first]
    whole = (sum(part[0] for part in parts), *parts[0][1:])
    return whole if first is None else (len({placement.entry for placement in targets}), *whole)


class ModelFiller:
    """Copies checkpoint tensors into a model's parameters and buffers, and tracks which are incomplete.

    Args:
        rank, size: Tensor-parallel rank and number of ranks.
        local_name: Maps the name of a target to its name in `model`, or to None if the target is on another rank.
    """

    def __init__(
        self,
        model: nn.Module,
        placements: Placements,
        rank: int,
        size: int,
        local_name: Callable[[str], str | None] = str,
    ) -> None:
        self._placements = placements
        self._rank = rank
        self._size = size
        self._local_name = local_name
        parameters = unstacked_parameters(model)
        self._targets = {**dict(model.named_buffers()), **parameters}
        named = (local_name(placement.target) for targets in placements.values() for placement in targets)
        needed = {name for name in named if name is not None}
        needed |= parameters.keys()
        self._empty = {name: self._targets[name].numel() for name in needed}

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's share of a checkpoint tensor to each of its destinations.

        Raises:
            ValueError: If the tensor does not have the shape that the model needs; the message gives both shapes.
        """
        targets = self._placements[name]
        for placement, part in zip(targets, _selected(name, tensor, targets), strict=True):
            target = self._local_name(placement.target)
            if target is not None:
                self._copy(name, placement, part, target)

    def wants(self, name: str) -> bool:
        """Return True if a checkpoint tensor has a destination on this rank."""
        return any(self._local_name(placement.target) is not None for placement in self._placements[name])

    def target(self, name: str) -> Tensor:
        """Return the first parameter or buffer on this rank that a checkpoint tensor fills."""
        names = (self._local_name(placement.target) for placement in self._placements[name])
        return next(self._targets[target] for target in names if target is not None)

    def unfilled(self) -> list[str]:
        """Return the sorted names of parameters and buffers that have not been filled completely."""
        return sorted(name for name, count in self._empty.items() if count)

    def _copy(self, name: str, placement: Placement, selected: Tensor, target: str) -> None:
        part = placement.view(self._targets[target].data)
        try:
            local = placement.split.local(selected, self._rank, self._size)
        except (ValueError, IndexError) as error:
            raise ValueError(f"tensor {name} of shape {_shape(selected)} cannot be split: {error}") from error
        needed = _needed_shape(part)
        if _shape(local) != needed:
            raise ValueError(f"tensor {name} has shape {_shape(local)}, but the model needs {needed}")
        part.copy_(local.reshape(part.shape))
        self._empty[target] -= part.numel()


def unstacked_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the unquantized parameters by name; a parameter that stacks experts is replaced by one view per expert."""
    modules = dict(model.named_modules())
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        prefix = name.rpartition(".")[0]
        owner = modules[prefix]
        if isinstance(owner, StackedExperts):
            found |= {f"{prefix}.{part}": view for part, view in owner.named_views()}
        elif not isinstance(owner, QuantizableLinear) or owner.form is None:
            found[name] = parameter
    return found


def _selected(name: str, tensor: Tensor, targets: tuple[Placement, ...]) -> list[Tensor]:
    """Return the part of a tensor for each destination; raise `ValueError` unless the parts cover the whole tensor."""
    try:
        parts = [placement.select(tensor) for placement in targets]
    except IndexError:
        parts = []
    if sum(part.numel() for part in parts) != tensor.numel():
        needed = f"{len(targets)} of {_shape(tensor)[1:]}"
        raise ValueError(f"tensor {name} has shape {_shape(tensor)}, but the model needs {needed}")
    return parts


def _needed_shape(part: Tensor) -> tuple[int, ...]:
    """Return the shape of a target view as in a checkpoint, where KV heads are part of the row dimension."""
    return (part[..., 0].numel(), part.shape[-1]) if part.dim() > 3 else _shape(part)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
