"""Estimate the savings of a cache by replaying a recorded workload through the policy code."""
