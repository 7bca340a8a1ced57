"""The ranks that hold one model together: what they agree on, and how differing decisions are found. No megatron."""
