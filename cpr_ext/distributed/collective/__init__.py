"""What workers of one round do together: compare, decide, exchange."""
