"""Tool calling: what models write when they call functions, and how it becomes an OpenAI message."""
