"""From a checked request to running and finished generations, the same for every API.

Public: `admission.admit`, `prompt.render_chat`, `Admission.start` and `start_chat`, `completion.complete`,
`generation.Delta` and `Generation`, `served_model.model_of`.
"""
