"""Bookkeeping of the tiers below the device and of copies between them; no torch, no files."""
