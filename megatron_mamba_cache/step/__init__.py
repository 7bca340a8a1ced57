"""One step of the engine: its rows, their layout on the device, and what is computed from it. No megatron."""
