"""Decisions of the cache: plain values in, frozen plans out. No torch and no megatron here."""
