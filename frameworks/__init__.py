"""Hook registrars, one room a framework: they turn gradients into slices of buckets."""

if __name__ == "frameworks":
    raise ImportError("import overlap.frameworks, not frameworks: `frameworks` would be a second copy")
