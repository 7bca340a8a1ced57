"""Sampling and verification of drafts on the device."""
