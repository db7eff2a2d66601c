"""Memory beyond the device: layers in host memory (`weight_offload`), and models that sleep there (`sleeper`)."""
