"""Speculative decoding: the drafter protocol, prompt lookup, and the policy for draft lengths."""

from typing import TYPE_CHECKING

from ..public_names import lazy_names

if TYPE_CHECKING:
    from .drafter import Draft, Drafter, DraftRequest, ReadsHiddenStates
    from .prompt_lookup import AutoDrafter, PromptLookupDrafter

_HOMES = {
    "AutoDrafter": "prompt_lookup",
    "Draft": "drafter",
    "DraftRequest": "drafter",
    "Drafter": "drafter",
    "PromptLookupDrafter": "prompt_lookup",
    "ReadsHiddenStates": "drafter",
}

__all__ = ["AutoDrafter", "Draft", "DraftRequest", "Drafter", "PromptLookupDrafter", "ReadsHiddenStates"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
