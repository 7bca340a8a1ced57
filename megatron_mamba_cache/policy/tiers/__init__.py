"""Bookkeeping of the host and disk tiers and of copies between tiers, without torch or file access."""
