"""Memory below the device: pinned host memory, disk files, and the threads that copy."""
