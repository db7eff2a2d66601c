"""Options of the commands, each declared once as a field of a settings struct.

A field `port: Annotated[int, Option("port to listen on", group="HTTP", low=0, high=65535)] = 8000` is the
command-line option `--port`, the environment variable `TESSERA_PORT`, the key `port` of a `--config` file and a row of
the documentation.

Public: `declaration.Option`, `declaration.check_fields`, `command_options.CommandOptions`, `parser.Parser`,
`reference.render_reference`, `errors.OptionError`.
"""
