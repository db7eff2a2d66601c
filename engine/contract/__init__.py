"""Types that the app and the engine share; imports nothing else of the project.

Public: `config.EngineConfig`, the errors of `errors`, the messages of `messages`, `sampling_params.SamplingParams` with
`RowFlag` and `ROW_PARAMETERS`, `sampling_row.SAMPLING_ROW`, `histogram.quantile`, `logs.configure_logging`.
"""
