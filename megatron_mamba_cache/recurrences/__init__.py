"""The pool of Mamba states on the device, and the allocator that gives KV blocks slots of it."""
