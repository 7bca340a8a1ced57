"""The errors this package raises on its own account."""


class CacheError(Exception):
    """Base of the package's own errors."""


class CacheCapacityError(CacheError):
    """There is no room for what was asked; the message names the setting that buys more."""


class CacheIntegrityError(CacheError):
    """An invariant of the cache does not hold; the message gives the equation that failed."""
