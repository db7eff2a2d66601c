"""Stand-ins for parts of the server: engines, clients, ports, time."""
