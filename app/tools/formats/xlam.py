"""xLAM: `[{"name": ..., "arguments": {...}}, ...]` and nothing else.

Source: the chat templates of Salesforce/Llama-xLAM-2-8b-fc-r and xLAM-2-3b-fc-r.
"""

from __future__ import annotations

from tessera.app.tools.call_list import CallListParser
from tessera.app.tools.call_object import CallObject
from tessera.app.tools.grammar import CallSyntax, json_call
from tessera.app.tools.tool_format import ToolFormat


class XlamParser(CallListParser):
    """A list is one of calls only at the beginning of the completion, of offered names with their arguments.

    Any other is content that happens to be JSON.
    """

    openers = markers = ()
    end_marker = "]"
    reads_bare_calls = True
    bare_opener = "["

    def _new_call(self) -> CallObject:
        return CallObject(self._writer, self._accepts, strict=True)

    def _accepts(self, name: str) -> bool:
        return name in self._tools


XLAM = ToolFormat(XlamParser, CallSyntax(json_call, lambda writer: ('"["', '"]"'), separator='", "'))
