"""The OpenAI-compatible endpoint: agents that were not written for RollArt become trajectories (docs/endpoint.md)."""
