"""Mixtures of experts: which experts a token takes, and the order of tokens by expert."""
