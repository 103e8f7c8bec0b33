"""Rollout engines: one interface (`base`), one file for each engine."""
