"""Mamba2: prefill scan and decode update, which read and write states in slots."""
