"""What the engine keeps of each request beside Megatron's record, and for a while of those that have left."""

from dataclasses import dataclass

from ..policy.requests import Candidate, RequestSpec

_REMEMBERED_REQUESTS = 65_536


@dataclass(slots=True)
class RequestState:
    """What the engine keeps of a request beside Megatron's record."""

    seed: int
    tenant: str = ""
    spec: RequestSpec | None = None  # of the record's newest request; read again after an eviction
    candidate: Candidate | None = None  # likewise
    age: int | None = None  # order of its first admission
    cached_tokens: int | None = None  # prompt tokens skipped at its first admission


class RequestStates(dict[int, RequestState]):
    """The states by request id."""

    def __init__(self) -> None:
        super().__init__()
        self._cached_tokens: dict[int, int] = {}  # of requests that have left, oldest first

    def cached_tokens(self, request_id: int) -> int:
        """Return the prompt tokens skipped at a request's first admission; 0 before that, or if it is forgotten."""
        if request_id in self:
            return self[request_id].cached_tokens or 0
        return self._cached_tokens.get(request_id, 0)

    def leave(self, request_id: int) -> None:
        """Keep only the cached tokens of a request; nothing happens if it has left already."""
        if request_id not in self:
            return
        self._cached_tokens[request_id] = self.pop(request_id).cached_tokens or 0
        while len(self._cached_tokens) > _REMEMBERED_REQUESTS:
            del self._cached_tokens[next(iter(self._cached_tokens))]
