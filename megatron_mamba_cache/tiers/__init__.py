"""Host and disk tiers of the cache: pinned memory, files, and copy threads."""
