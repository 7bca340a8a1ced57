"""What a cache would save on a recorded load: recorded requests, replayed through the real policy code."""
