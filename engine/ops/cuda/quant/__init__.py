"""Products by weights that are not dense. Public: `dequantize.DequantizeOps`, the path for every format."""
