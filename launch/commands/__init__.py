"""What people do on hosts and with runs beside training: one module a group of commands, an exit code each."""
