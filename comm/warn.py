"""Warnings of ours: filters decide on each rank, and the launcher shows equal ones of several ranks once."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import TextIO

# Shows a warning's message, formatted as the second argument has it, for the whole job; says whether it did.
# None where no launcher of ours would. Whoever found the launcher sets it: this room knows of none.
show_for_job: Callable[[str, str], bool] | None = None

# Python's own, to which everything goes that is not for the launcher.
_show: Callable[..., None] = warnings.showwarning


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Issue a warning of ours; like `warnings.warn`, except for where it is printed.

    Args:
        message: what is wrong, and what to do.
        category: its class, which takes the message alone.
        stacklevel: whose line it names, 1 for the caller's.

    Raises:
        Warning: the filters make an error of it.
    """
    _divert()
    warning = category(message)
    warning.__dict__["is_overlaps"] = True
    warnings.warn(warning, stacklevel=stacklevel + 1)


def _divert() -> None:
    """Have our warnings shown by `show_for_job`, unless somebody else shows or records warnings now.

    Done at each warning, not once: `catch_warnings` puts back what it found.
    """
    global _show
    # A recording `catch_warnings` (that of pytest.warns, too) puts a list's method in place of this function.
    recorded = not isinstance(getattr(warnings, "_showwarnmsg_impl", None), types.FunctionType)
    replaced = getattr(warnings.showwarning, "__module__", "") != "warnings"
    if show_for_job is not None and not recorded and not replaced:
        _show, warnings.showwarning = warnings.showwarning, _show_ours


def _show_ours(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if show_for_job is not None and getattr(message, "is_overlaps", False):
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if show_for_job(str(message), text):
            return
    _show(message, category, filename, lineno, file, line)
