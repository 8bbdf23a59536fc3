"""What goes wrong with the rehearsal's machines."""


class MachinesError(Exception):
    """What was asked, what Docker or the machine said to it, and what to do."""
