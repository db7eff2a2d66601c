"""Collective operations of the ranks of a model that several devices share (tensor parallelism).

Public: `interface.Collectives`, one rank's side of it; `rendezvous.Rendezvous`, where ranks wait for one another;
`cpu.CpuCollectives`, ranks that are threads and share the host's memory; `cuda.CudaCollectives`, ranks on GPUs that see
each other's, and `peers.PeerGroup`, by which they find each other; `nccl.NcclCollectives` and `nccl.NcclGroup` for GPUs
that do not, over `nccl_library.NcclLibrary`.
"""
