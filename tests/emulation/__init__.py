"""Runs the kernels' own sources on the CPU, to see what they compute where there is no GPU.

`source` turns a kernel's file into C++: asm statements become calls of functions named after the instruction, which
are in `ptx.h` and, those of sm_90a, in `sm90.h`. `device` compiles that and is a device for `CudaOps`; `tensor_maps`
makes maps for TMA in the driver's place. `races.cc` watches shared memory for races, with what `order.cc` knows of the
order that barriers give. Kernels of a graph do not overlap, and memory of the device is not watched.
"""
