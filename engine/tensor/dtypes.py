"""Element types of device tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np

float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
int8 = np.dtype(np.int8)
int32 = np.dtype(np.int32)
uint32 = np.dtype(np.uint32)
uint64 = np.dtype(np.uint64)
uint8 = np.dtype(np.uint8)

FLOAT_DTYPES = (float32, float16, bfloat16)
