"""Drafters with weights of their own."""
