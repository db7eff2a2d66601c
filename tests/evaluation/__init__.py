"""How right the built-in model's answers are, asked over HTTP."""
