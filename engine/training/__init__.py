"""Training of decoders: the same specifications and weights as serving, over `engine.autograd`.

Public: `decoder.TrainableDecoder`, `parameters` (by the names of checkpoints), `lora`, the room `optimizers`,
`schedule`, `examples`, `stream.ExampleStream` of endless ones, `trainer.Trainer` (one step), `run.TrainingRun` (the
loop with checkpoints), `model_folder` and `tensor_files` (safetensors).
"""
