"""This process's place in the job: init, shutdown, rank and size; the only process-wide state."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

from overlap.comm import warn
from overlap.comm.engine import Engine
from overlap.comm.errors import account_of
from overlap.comm.world import World, discover

from .config import Settings

_engine: Engine | None = None
_owner = 0  # the process that called init: a forked child inherits the engine but not its threads
_generation = 0  # how often this process has met its peers


def init() -> None:
    """Find the other ranks of this job and connect to them. Calling it again does nothing.

    The world is found from `overlap run`'s variables or torchrun's; without either it is a world of one, in
    which everything works.

    Raises:
        StartError: not all ranks came, or the launcher's variables can't be honoured.
        ValueError: an OVERLAP_* variable has a value that it can't have.
    """
    global _engine, _owner, _generation
    if _engine is not None:
        _check_not_forked()
        return
    settings, world = Settings.read(), discover()
    _engine = _connect(world, _generation, settings)
    _owner = os.getpid()
    _generation += 1
    _install_excepthook()
    if os.environ.get("OVERLAP_LAUNCHER"):
        warn.show_for_job = _show_warning
    # Again on each init would run it twice; unregistering first is atexit's own idiom.
    atexit.unregister(shutdown)
    atexit.register(shutdown)


def _connect(world: World, generation: int, settings: Settings) -> Engine:
    from overlap.comm import control
    from overlap.comm.backends import connect
    from overlap.comm.named import NamedOperations

    communicator = connect(world, generation, settings.start_timeout_s, settings.spin_us / 1e6)
    own = communicator.split(0)
    assert own is not None  # every rank gave a color
    messages = control.connect(world, generation, settings.start_timeout_s)
    named = NamedOperations(own, messages, settings.stall_warn_s, settings.stall_abort_s)
    return Engine(world, communicator, named)


def shutdown() -> None:
    """Leave the job: other ranks that still need this one raise PeerLost. Without `init` it does nothing."""
    global _engine
    if _engine is None or os.getpid() != _owner:
        return
    engine, _engine = _engine, None
    engine.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return _engine is not None


def engine() -> Engine:
    """The engine of this process.

    Raises:
        ValueError: `init` was not called.
        RuntimeError: this is a forked child of a rank.
    """
    if _engine is None:
        raise ValueError("overlap is not initialized: call overlap.init() first")
    _check_not_forked()
    return _engine


def _check_not_forked() -> None:
    if os.getpid() != _owner:
        raise RuntimeError(
            f"process {os.getpid()} was forked from a rank (process {_owner}) and can't communicate: "
            "call overlap in the rank itself, not in a data-loader worker"
        )


def world() -> World:
    """Who is in this job, as this rank sees it."""
    return engine().world


def rank() -> int:
    """This process's number in the job, 0 to size() - 1."""
    return world().rank


def size() -> int:
    """How many processes the job has."""
    return world().size


def local_rank() -> int:
    """This process's number on its host, 0 to local_size() - 1."""
    return world().local_rank


def local_size() -> int:
    """How many of the job's processes run on this host."""
    return world().local_size


def cross_rank() -> int:
    """This host's number among the job's hosts."""
    return world().cross_rank


def cross_size() -> int:
    """How many hosts the job has."""
    return world().cross_size


def abort(error: BaseException) -> None:
    """Tell the other ranks that this one fails with `error`, so that they raise PeerLost at once."""
    if _engine is not None and os.getpid() == _owner:
        _engine.abort(*account_of(error))


def _show_warning(message: str, text: str) -> bool:
    from .launch.report import report_warning

    return report_warning(message, text)


def _install_excepthook() -> None:
    """An uncaught exception first reaches the peers, so that theirs is one line, then the launcher."""
    previous = sys.excepthook
    if getattr(previous, "is_overlaps", False):
        return

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        from .launch.report import report_failure

        abort(error)
        if not report_failure(kind, error, traceback):
            previous(kind, error, traceback)

    excepthook.is_overlaps = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook
