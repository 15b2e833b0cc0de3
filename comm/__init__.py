"""The comm engine: bytes, dtypes, ranks and time; knows no framework."""

if __name__ == "comm":
    raise ImportError("import overlap.comm, not comm: `comm` would be a second copy of the module")
