"""What a recurrence is, and its states on the device: their pool, moves between slots, and cached forms."""
