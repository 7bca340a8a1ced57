"""Estimate how much prefill a cache saves, by replaying a recorded workload through the policy code."""
