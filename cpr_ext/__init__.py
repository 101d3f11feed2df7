"""CPR: checkpointing with partial recovery for recommendation models."""
