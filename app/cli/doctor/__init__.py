"""`tessera doctor`: checks of the machine.

Public: `command.doctor_command`, `options.DOCTOR_OPTIONS`.
"""
