"""Tessera: an OpenAI-compatible LLM server on cuda-python and NVRTC.

Everything that is installed is imported as `tessera.app`, `tessera.engine`, `tessera.loadtest` and
`tessera.cuda_src`. In the repository these are links to the folders of the same name beside this one,
so the wheel, an editable checkout and a plain one share one import name.
"""

from pathlib import Path
from typing import TYPE_CHECKING

PACKAGE_ROOT = Path(__file__).parents[1]  # holds the package `tessera`; the working folder of child processes

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name):
        """`__version__`, found when it is asked for: that takes longer than to import most modules."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("tessera-llm")
        except PackageNotFoundError:
            return "unknown"
