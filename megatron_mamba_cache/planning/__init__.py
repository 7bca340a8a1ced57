"""Savings of a cache on a recorded load, by replaying it through the policy code."""
