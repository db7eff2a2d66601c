"""The operations a forward needs: one interface (`interface.Ops`), a NumPy and a CUDA implementation.

Public: `interface.Ops` and what its methods take, `make.make_ops`. An interface file holds one group: `linear`,
`layer` (norms, activations), `attention`, `encoder`, `sampling`.
"""
