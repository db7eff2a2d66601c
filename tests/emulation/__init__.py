"""Runs the kernels' own sources on the CPU, to see what they compute where there is no GPU.

`source` turns a kernel's file into C++: asm statements become calls of functions named after the instruction, which
are in `ptx.h`. `device` compiles that and is a device for `CudaOps`. `races.cc` watches shared memory for races. What
only sm_90a has is not emulated.
"""
