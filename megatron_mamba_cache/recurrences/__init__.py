"""The interface of a recurrence, and its states on the device: pool, moves between slots, cached forms."""
