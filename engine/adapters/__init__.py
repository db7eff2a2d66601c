"""LoRA adapters of PEFT's format for serving: read from folders, and placed in slots beside a model's weights.

Public: `modules.adaptable_modules`, which modules of a model can have adapters; `config.read_adapter_config` and
`reader.read_adapter`, an adapter's folder; `slots.AdapterSlots`, device memory for some adapters at a time;
`catalog.AdapterCatalog`, all adapters by name, with those in host memory; `seats.AdapterSeats`, which of
them are in slots, and which sequences may run.
"""
