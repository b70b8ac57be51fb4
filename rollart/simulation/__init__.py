"""The shipping controller in virtual time, beside simulated workers that speak the real protocol."""
