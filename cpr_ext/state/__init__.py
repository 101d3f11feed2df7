"""What is saved: tables, the dense state, the position of training."""
