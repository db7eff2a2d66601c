"""What devices there are, and how busy they are: for the command line and for metrics."""
