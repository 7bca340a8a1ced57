"""Kernels that sample tokens and verify drafts."""
