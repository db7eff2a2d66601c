"""Switches, each of which `python -m tests.bench.lora --variants` measures the other way round."""

FUSES_NORMS = True  # whether a norm of few rows is beside the product with A
BEGINS_NEXT = True  # whether the activation of few rows is multiplied with the next product's A where it is made
# Whether products of few rows by wgmma add the products with B.
FUSES_PRODUCTS = True
FUSES_GATES = True  # whether also those with an activation, whose next product with A is then one by itself
