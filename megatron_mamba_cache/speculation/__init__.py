"""Drafts for decode steps: who proposes tokens, and how many are worth verifying. No megatron here."""
