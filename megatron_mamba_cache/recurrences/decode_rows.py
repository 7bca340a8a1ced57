from .rows import *  # noqa: F403
