"""Who a worker is, and what shows it: locks, secrets, signs of life."""
