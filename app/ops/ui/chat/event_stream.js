// Server-sent events of a streamed completion.

/** The objects in a response's `data:` lines, until `[DONE]`. Raises an Error if the stream ends without it. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      const lines = value.split("\n");
      lines[0] = rest + lines[0];
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
