"""Every setting, once: name, unit, default, environment variable and one sentence each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def _setting(default: Any, env: str, help: str, least: float = 0, horovod: str = "") -> Any:
    """`horovod`: Horovod's variable of the same meaning, read where ours is not set."""
    return field(default=default, metadata={"env": env, "help": help, "least": least, "horovod": horovod})


@dataclass(frozen=True)
class Settings:
    """The settings of one process; `Settings.read()` takes them from the environment.

    >>> Settings.read({"OVERLAP_BUCKET_MB": "2"}).bucket_mb
    2.0
    """

    bucket_mb: float = _setting(
        4.0, "OVERLAP_BUCKET_MB", "Largest bucket in MB (1e6 bytes); a larger parameter has its own."
    )
    edge_bucket_mb: float = _setting(
        1.0,
        "OVERLAP_EDGE_BUCKET_MB",
        "Largest first and last bucket in MB: the first starts early, the last ends soon after backward.",
    )
    start_timeout_s: float = _setting(
        60.0,
        "OVERLAP_START_TIMEOUT_S",
        "Seconds that ranks wait for each other to start.",
        least=0.1,
        horovod="HOROVOD_START_TIMEOUT",
    )
    spin_us: float = _setting(
        100.0, "OVERLAP_SPIN_US", "Microseconds that the engine's thread looks for a peer before it sleeps."
    )

    stall_warn_s: float = _setting(
        60.0,
        "OVERLAP_STALL_WARN_S",
        "Seconds that a named operation waits for ranks before a warning names them; 0 is never.",
        horovod="HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_abort_s: float = _setting(
        0.0,
        "OVERLAP_STALL_ABORT_S",
        "Seconds that a named operation waits for ranks before it fails with StallError; 0 is never.",
        horovod="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Take settings from `environ`.

        Raises:
            ValueError: a variable is not a number, or too small; the message names it.
        """
        values = {}
        for setting in fields(cls):
            name, least = setting.metadata["env"], setting.metadata["least"]
            if name not in environ and setting.metadata["horovod"] in environ:
                name = setting.metadata["horovod"]
            if name in environ:
                try:
                    values[setting.name] = float(environ[name])
                except ValueError:
                    values[setting.name] = float("nan")
                if not values[setting.name] >= least:
                    raise ValueError(f"{name} must be a number of at least {least}, not {environ[name]!r}")
        return cls(**values)
