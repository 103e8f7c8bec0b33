"""The run directory: metrics, ledgers, memory over time, plots and tables."""
