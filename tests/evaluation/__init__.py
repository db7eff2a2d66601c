"""How right the built-in model's answers are, asked over HTTP, and what quantising its weights changes."""

import tests.support.single_blas_thread  # noqa: F401 (it must come before NumPy)
