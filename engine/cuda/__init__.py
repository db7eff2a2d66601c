"""The driver layer, the only importer of `cuda.*`: device, memory, compiler, cubin cache, kernels."""
