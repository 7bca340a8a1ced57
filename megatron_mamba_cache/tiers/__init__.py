"""Host and disk tiers of the cache: pinned memory, entry files and copy threads."""
