"""Deserialisation: pickles that came in over sockets which nobody meant to open.

That no module reads pickles, nor evaluates code, is `tests/structure/test_rooms.py`'s to show.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.servers.server_fixture import Server

LISTENS = "0A"  # the state in Linux's table of TCP sockets
IS_BOUND = "07"  # and in that of UDP sockets


def processes_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in processes_of(int(child)))]


def open_ports(pid: int) -> set[tuple[str, int]]:
    """The sockets of a process that take what comes over a network: protocol and port."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = descriptor.readlink().name
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for protocol, state in (("tcp", LISTENS), ("tcp6", LISTENS), ("udp", IS_BOUND), ("udp6", IS_BOUND)):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                found.add((protocol, int(fields[1].rpartition(":")[2], 16)))
    return found


def test_fault_deserialisation_only_the_http_port_listens(tiny_server: Server) -> None:
    """App and engine speak through sockets in a folder of the user's own."""
    tiny_server.complete([5, 6, 7], 2)
    port = int(tiny_server.url.rpartition(":")[2])
    pids = processes_of(tiny_server.process.pid)
    assert tiny_server.engine_pid() in pids
    assert set().union(*map(open_ports, pids)) == {("tcp", port)}
