"""causal-conv1d's convolution, where it is installed and was built."""

from collections.abc import Callable


def peer_conv() -> Callable[..., object] | None:
    """Return `causal_conv1d_fn`; None without it."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    function: Callable[..., object] = causal_conv1d_fn
    return function
