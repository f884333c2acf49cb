"""OpenGEM: train LLM-scale recommendation foundation models efficiently.

Importing this package loads neither torch, CUDA nor Triton; names are loaded on first use.
Start with `opengem.jagged`, then docs/tour.md.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opengem.jagged import Jagged

__version__ = "0.1.0"
__all__ = ["Jagged", "__version__"]


def __getattr__(name: str):
    if name == "Jagged":
        from opengem.jagged import Jagged

        return Jagged
    raise AttributeError(f"module 'opengem' has no attribute {name!r}")
