"""The errors that this package defines."""


class CacheError(Exception):
    """Base of the package's own errors."""


class CacheCapacityError(CacheError):
    """There is not enough room for an allocation; the message names the setting to raise."""


class CacheIntegrityError(CacheError):
    """An invariant of the cache does not hold; the message gives the equation that failed."""
