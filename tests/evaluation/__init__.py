"""The accuracy of the built-in model, asked over HTTP, and how quantised weights change it."""

import tests.support.processes.single_blas_thread  # noqa: F401 (it must come before NumPy)
