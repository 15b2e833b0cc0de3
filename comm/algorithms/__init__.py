"""Collective algorithms over send and receive, named as the literature names them."""
