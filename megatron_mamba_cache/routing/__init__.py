"""Several replicas behind Megatron's coordinator: who gets a request, and what happens when a replica dies."""
