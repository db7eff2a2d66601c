"""OpenAI's Responses API: items in, items and events out, over the same conversations as chat."""
