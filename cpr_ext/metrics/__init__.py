"""What checkpointing did and cost a run."""
