"""The convolution of causal-conv1d, if that library is installed."""

from collections.abc import Callable


def peer_conv() -> Callable[..., object] | None:
    """Return `causal_conv1d_fn`; None if it cannot be imported."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    function: Callable[..., object] = causal_conv1d_fn
    return function
