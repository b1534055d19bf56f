"""What other processes are started with."""

import os
import re


def xla_flags(devices: int) -> str:
    """The tests' own `XLA_FLAGS`, which compile fast, for so many devices."""
    return re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
