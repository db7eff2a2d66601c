"""Operations that only training needs: backwards, attention without a cache, losses, steps of optimisers.

Public: `interface.TrainingOps` and what its methods take, `make.make_training_ops`. Each file declares one group; the
NumPy implementation is in `cpu`.
"""
