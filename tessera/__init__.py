"""Tessera: an OpenAI-compatible LLM server on cuda-python and NVRTC.

Everything that is installed is imported as `tessera.app`, `tessera.engine`, `tessera.loadtest` and
`tessera.cuda_src`. In the repository these are links to the folders of the same name beside this one,
so the wheel, an editable checkout and a plain one share one import name.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE_ROOT = Path(__file__).parents[1]  # holds the package `tessera`; the working folder of child processes

try:
    __version__ = version("tessera-llm")
except PackageNotFoundError:
    __version__ = "unknown"
