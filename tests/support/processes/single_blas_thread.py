"""Imported before NumPy: the tests' matrices are so small that BLAS threads would only wait for one another.

With two cores, of which the app and the test itself take their share, a step of 32 sequences is eight
times as fast on one thread. Engines that the tests start inherit the setting.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
