"""Replicas of an engine and their coordinator, which routes requests by cached prefix."""

from typing import TYPE_CHECKING

from ..public_names import lazy_names

if TYPE_CHECKING:
    from .clients import KeyedInferenceClient, ReplicaClient
    from .engine import ReplicaEngine
    from .settings import RoutingSettings

_HOMES = {
    "KeyedInferenceClient": "clients",
    "ReplicaClient": "clients",
    "ReplicaEngine": "engine",
    "RoutingSettings": "settings",
}

__all__ = ["KeyedInferenceClient", "ReplicaClient", "ReplicaEngine", "RoutingSettings"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
