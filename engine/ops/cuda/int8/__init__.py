"""Products of rows as int8 by weights as int8. Public: `ops.Int8LinearOps`, and `sm90`, the kernel."""
