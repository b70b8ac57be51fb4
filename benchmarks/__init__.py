"""Measurements and figures; each module is a command."""
