"""Memory below the device, and what copies between the tiers: pinned host memory, threads, files."""
