"""TurboQuant for PyTorch: KV caches of 2 to 8 bits per channel that attention reads directly."""

from torch_turboquant._library import build_info
from torch_turboquant._version import __version__

__all__ = ["__version__", "build_info"]
