"""Environments of other libraries, each behind a thin class over the real package, which must be installed."""
