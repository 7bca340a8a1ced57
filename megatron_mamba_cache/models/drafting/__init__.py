"""Drafters that have their own weights."""
