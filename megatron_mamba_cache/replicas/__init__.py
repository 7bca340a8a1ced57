"""Replicas of an engine and their coordinator, which routes requests by cached prefix."""

from typing import TYPE_CHECKING

from ..public_names import lazy_names

if TYPE_CHECKING:
    from .engine import ReplicaEngine
    from .keyed_client import KeyedInferenceClient
    from .settings import RoutingSettings

_HOMES = {"KeyedInferenceClient": "keyed_client", "ReplicaEngine": "engine", "RoutingSettings": "settings"}

__all__ = ["KeyedInferenceClient", "ReplicaEngine", "RoutingSettings"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
