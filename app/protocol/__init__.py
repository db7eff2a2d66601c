"""Shapes of requests, as OpenAI's API description has them plus the sampling fields other servers added."""
