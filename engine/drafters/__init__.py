"""Models that draft tokens for another one, on its device.

Public: `make.make_drafter`; `draft_model.DraftModel`; `eagle3.Eagle3`; `predictor.Predictor`.
"""
