"""Training of decoders: the same specifications and weights as serving, over `engine.autograd`.

Public: `decoder.TrainableDecoder`, `parameters` (by the names of checkpoints), `lora`, `optimizer.AdamW`, `schedule`,
`examples`, `trainer.Trainer` (one step), `run.TrainingRun` (the loop with checkpoints), `model_folder`,
`tensor_files` (safetensors) and the room `pretraining`.
"""
