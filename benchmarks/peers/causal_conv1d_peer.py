"""causal-conv1d's convolution, if it is installed and built."""

from collections.abc import Callable


def peer_conv() -> Callable[..., object] | None:
    """Return `causal_conv1d_fn`; None if it is not available."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    function: Callable[..., object] = causal_conv1d_fn
    return function
