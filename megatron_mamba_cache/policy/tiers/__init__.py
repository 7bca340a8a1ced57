"""Bookkeeping of the lower tiers and of the copies between tiers, without torch or file access."""
