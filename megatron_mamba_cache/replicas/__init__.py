"""Several replicas behind a coordinator: routing by cached prefix, membership, and the engine of a replica."""
