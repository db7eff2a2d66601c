"""What stands for a part of the server: engines, clients, ports, time."""
