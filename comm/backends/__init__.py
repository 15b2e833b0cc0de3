"""Communicators: one file a backend, each against the contract in `base.py`."""
