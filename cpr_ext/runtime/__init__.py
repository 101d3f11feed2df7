"""The Python process around a run: forks, threads at its end, text for its logs."""
