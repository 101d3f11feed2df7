"""Checkpointing in training loops of other libraries."""
